"""The training step and the evaluation step: the one jitted program around each.

The bodies are `Bodies`'s: what ONE shard does. The optimizer acts on the gradients they return, on global arrays in the
same program, so that any optax optimizer (also one that looks at whole matrices or norms) means what it says under
every layout.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd_distill.bodies import Bodies
from spmd_distill.distributed import place
from spmd_distill.optimizer import SKIP, Skip, UpdateRule, as_rule, moment_specs, on_host, only, state_specs
from spmd_distill.sharding import REPLICATED
from spmd_distill.types import Batch, Mean, Metrics, Params, TrainState


@dataclass(frozen=True)
class Distillation(Bodies):
    """A student, a teacher and an objective, on a mapper: the programs that train and evaluate."""

    # -- programs -------------------------------------------------------------------------------------------------

    def train_step(
        self,
        tx: optax.GradientTransformation | UpdateRule,
        *,
        return_gradients: bool = False,
        skip: Skip = SKIP,
    ) -> Callable[..., Any]:
        """Compile on first call: ``(state, teacher_params, batch [A, B, L]) -> (state, metrics)``.

        The state is donated. With ``return_gradients`` the gradients before clipping come as a third output. A step
        that ``skip`` stops keeps parameters and optimizer state bit for bit and advances the step's number alone: its
        batch and its random numbers are used up. Its metric ``skipped`` is 1. With ``skip.spike`` the step takes a
        fourth argument, the largest loss as a float32 scalar.
        """
        rule, layout, shardings = as_rule(tx), self.mapper.layout, self.mapper.shardings
        specs = self.trained.specs(layout)
        cut = only(rule.trained, specs)
        whole = (REPLICATED,) * (2 if rule.loss_scale is None else 3)
        given = (specs, self.teacher.model.specs(layout), self.batch_specs(1), *whole)
        train = functools.partial(self.gradients if self.foreign else self.train_body, trained=rule.trained)
        body = train if self.foreign else self.mapper.map(train, given, (cut, REPLICATED, REPLICATED))
        spread = shardings(only(rule.trained, moment_specs(rule, self.trained.abstract, specs, layout)))
        resting, working = self.state_shardings(rule), self.state_shardings(replace(rule, offload=False))

        def place(tree: Any) -> Any:
            return jax.lax.with_sharding_constraint(tree, spread) if rule.shard_state else tree

        def step(state: TrainState, teacher_params: Params, batch: Batch, *limit: jax.Array) -> Any:
            if rule.offload:
                state = jax.device_put(state, working)
            factor = rule.factor(state)
            scale = () if factor is None else (factor,)
            grads, sums, count = body(state.params, teacher_params, batch, state.step, state.seed, *scale)
            grads = rule.unscaled(grads, state)
            norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(_wide(g)), grads))
            ok = skip.ok(sums, count, norm, *limit or (jnp.inf,))
            new = rule.apply(state, grads, ok, sums["loss"] / jnp.maximum(count, 1), place)
            seen = {"grad_norm": norm, "skipped": 1 - ok.astype(jnp.int32)}
            seen |= {} if factor is None else {"loss_scale": factor}
            metrics = _means(sums, count) | {name: Mean(x, jnp.int32(1)) for name, x in seen.items()}
            return (new, metrics, grads) if return_gradients else (new, metrics)

        out = (resting, shardings(REPLICATED), *([shardings(cut)] if return_gradients else []))
        return jax.jit(step, donate_argnums=0, out_shardings=out)

    def evaluated_params(self, tx: optax.GradientTransformation | UpdateRule) -> Callable[[TrainState], Params]:
        """What gives the parameters to evaluate and to keep of a state: `UpdateRule.evaluated`, cut like parameters."""
        rule = as_rule(tx)
        if not rule.averages(self.abstract_state(rule)):
            return lambda state: state.params
        working = self.state_shardings(replace(rule, offload=False))
        bring = lambda state: jax.device_put(state, working) if rule.offload else state  # noqa: E731
        where = self.mapper.shardings(self.trained.specs(self.mapper.layout))
        return jax.jit(lambda state: rule.evaluated(bring(state)), out_shardings=where)

    def eval_step(self) -> Callable[[Params, Params, Batch, jax.Array], Metrics]:
        """Compile on first call: ``(params, teacher_params, batch [B, L], step) -> metrics``, sums over the batch."""
        layout = self.mapper.layout
        specs = (
            self.trained.specs(layout),
            self.teacher.model.specs(layout),
            self.batch_specs(0),
            REPLICATED,
        )
        mapped = self.mapper.map(self.eval_body, specs, REPLICATED)
        body: Callable[..., Any] = self.evaluation if self.foreign else mapped
        return jax.jit(lambda *args: _means(*body(*args)), out_shardings=self.mapper.shardings(REPLICATED))

    def evaluate(
        self,
        eval_step: Callable[..., Metrics],
        params: Params,
        teacher_params: Params,
        batches: Iterable[Batch],
        step: Any,
    ) -> Metrics:
        """Run what `eval_step` returned over batches ``[B, L]`` of the host, one at a time; their metrics, pooled."""
        shardings, total = self.mapper.shardings(self.batch_specs(0)), {}
        for batch in batches:
            placed = place(batch, shardings)
            found = jax.block_until_ready(eval_step(params, teacher_params, placed, step))
            total = {name: total[name] + value if total else value for name, value in found.items()}
        return total

    # -- placement ------------------------------------------------------------------------------------------------

    def abstract_state(self, tx: optax.GradientTransformation | UpdateRule) -> TrainState:
        """Shapes and types of a state."""
        return jax.eval_shape(lambda p: as_rule(tx).start(p, 0), self.trained.abstract)

    def state_specs(self, tx: optax.GradientTransformation | UpdateRule) -> TrainState:
        """Where every part of the train state lies; the optimizer's moments follow their parameters."""
        layout = self.mapper.layout
        return state_specs(as_rule(tx), self.trained.abstract, self.trained.specs(layout), layout)

    def state_shardings(self, tx: optax.GradientTransformation | UpdateRule) -> TrainState:
        """`state_specs` on the mapper's devices, or in their host's memory (`UpdateRule.offload`).

        Raises `UserError` where the platform has no such memory.
        """
        found = self.mapper.shardings(self.state_specs(tx))
        return on_host(found, self.mapper.devices) if as_rule(tx).offload else found


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _means(sums: dict[str, jax.Array], count: jax.Array) -> Metrics:
    return {name: Mean(total, count) for name, total in sums.items()}
