"""From gradients to the next train state: what is trained, scaled, skipped and averaged, around any optax optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState

from spmd_distill.optimizer.paths import filled, only
from spmd_distill.optimizer.scaling import LossScale
from spmd_distill.optimizer.update import keep_unless
from spmd_distill.types import Params, TrainState


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer, and what happens around it. Everything acts on global arrays, in the step's program."""

    tx: optax.GradientTransformation
    trained: Any = None
    """A tree of bools like the parameters: which are trained. Of the others there is no gradient and no state. None is
    all of them."""
    loss_scale: LossScale | None = None
    ema: float | None = None
    """Decay of a moving average of the parameters, which is then what is evaluated."""
    shard_state: bool = False
    """Cut optimizer state and moving average over the batch axes too."""
    offload: bool = False
    """Keep optimizer state and moving average in the host's memory between steps."""

    def start(self, params: Params, seed: Any) -> TrainState:
        """The state at step 0."""
        trained = only(self.trained, params)
        # A copy of its own, for the parameters are donated apart from it.
        ema = None if self.ema is None else jax.tree.map(lambda p: jnp.array(p, _wide(p), copy=True), trained)
        scale = None if self.loss_scale is None else self.loss_scale.init()
        return TrainState(jnp.int32(0), params, self.tx.init(trained), jnp.uint32(seed), ema, scale)

    def factor(self, state: TrainState) -> jax.Array | None:
        """What the loss of the next step is multiplied by."""
        return None if self.loss_scale is None else self.loss_scale.factor(state.loss_scale)

    def unscaled(self, grads: Any, state: TrainState) -> Any:
        """Gradients of the loss, from those of the scaled loss."""
        factor = self.factor(state)
        return grads if factor is None else jax.tree.map(lambda g: (g.astype(_wide(g)) / factor).astype(g.dtype), grads)

    def apply(
        self,
        state: TrainState,
        grads: Any,
        ok: jax.Array,
        loss: jax.Array,
        place: Callable[[Any], Any] = lambda tree: tree,
    ) -> TrainState:
        """The next state. Without ``ok`` only its step moves on, and a dynamic loss scale.

        Args:
            state: the state before the step.
            grads: gradients of the (unscaled) loss by the trained parameters.
            ok: a boolean scalar: may the update happen?
            loss: for optimizers that look at it.
            place: cuts a tree of trained parameters as the optimizer's state is cut.
        """
        before = place(only(self.trained, state.params))
        tx = optax.with_extra_args_support(self.tx)
        updates, opt_state = tx.update(place(grads), state.opt_state, before, value=loss)
        after = place(optax.apply_updates(before, updates))
        ema = state.ema if self.ema is None else _averaged(state.ema, after, self.ema, state.step)
        new, old = (after, opt_state, ema), (before, state.opt_state, state.ema)
        after, opt_state, ema = keep_unless(ok, new, old)
        scale = None if self.loss_scale is None else self.loss_scale.after(state.loss_scale, ok)
        return TrainState(state.step + 1, filled(after, state.params), opt_state, state.seed, ema, scale)

    def evaluated(self, state: TrainState) -> Params:
        """The parameters to evaluate and to keep: the moving average, a schedule-free optimizer's, or the trained."""
        if self.ema is not None:
            found = state.ema
        elif (free := _schedule_free(state.opt_state)) is not None:
            found = optax.contrib.schedule_free_eval_params(free, only(self.trained, state.params))
        else:
            return state.params
        return jax.tree.map(lambda x, p: x.astype(p.dtype), filled(found, state.params), state.params)

    def averages(self, state: TrainState) -> bool:
        """Whether what is evaluated is not what is trained; ``state`` may be abstract."""
        return self.ema is not None or _schedule_free(state.opt_state) is not None


def as_rule(tx: optax.GradientTransformation | UpdateRule) -> UpdateRule:
    """An optimizer alone trains everything and averages nothing."""
    return tx if isinstance(tx, UpdateRule) else UpdateRule(tx)


def _averaged(ema: Any, params: Any, decay: float, step: jax.Array) -> Any:
    """The moving average after ``step + 1`` steps. It begins as the student, and forgets that early."""
    n = (step + 1).astype(jnp.float32)
    rate = 1 - jnp.minimum(decay, (1 + n) / (10 + n))
    return jax.tree.map(lambda e, p: e + rate.astype(e.dtype) * (p.astype(e.dtype) - e), ema, params)


def _schedule_free(opt_state: Any) -> Any:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, ScheduleFreeState))
    return next((x for x in leaves if isinstance(x, ScheduleFreeState)), None)


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)
