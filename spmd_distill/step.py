"""The training step and the evaluation step: shard bodies, and the one jitted program around each.

`Distillation` ties the parts together. Its bodies are what ONE shard does; a mapper runs them. The optimizer acts
on the gradients the body returns, on global arrays in the same program, so that any optax optimizer (also one that
looks at whole matrices or norms) means what it says under every layout.

A `ForeignModel` runs on global arrays too, in the same program, before the body (its gradient: after it). Inside the
body, what it returned stands where a model of ours has parameters.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd_distill.collectives import psum, to_varying, vary_like
from spmd_distill.distributed import place
from spmd_distill.head import AbstractHead, FusedHead
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import Shard
from spmd_distill.models.foreign import AnyModel, ForeignModel
from spmd_distill.objective import Objective
from spmd_distill.optimizer import SKIP, Skip, guarded_update
from spmd_distill.sharding import REPLICATED, Specs, is_spec, sharded_axes
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch, Mean, Metrics, Params, TrainState, Unembedded


@dataclass(frozen=True)
class Distillation:
    """A student, a teacher and an objective, on a mapper."""

    student: AnyModel
    teacher: OnlineTeacher
    objective: Objective
    mapper: AbstractMapper
    head: AbstractHead = field(default_factory=FusedHead)
    compute_dtype: Any = jnp.float32

    @property
    def shard(self) -> Shard:
        """The cut that both models run in."""
        return Shard(self.mapper.layout, jnp.dtype(self.compute_dtype))

    # -- shard bodies ---------------------------------------------------------------------------------------------

    def train_body(
        self, params: Params, teacher_params: Params, batch: Batch, step: jax.Array, seed: jax.Array
    ) -> tuple[Params, dict[str, jax.Array], jax.Array]:
        """One shard's part of a step: gradients, metric sums and the valid-token count of micro-batches ``[A, B, L]``.

        Gradients come out summed over the batch axes and cut like the parameters.
        """
        batch_axes = self.mapper.layout.batch_axes
        missing = self._unsharded_batch_axes(self.student.specs(self.mapper.layout))
        count = psum(jnp.sum(batch.mask, dtype=jnp.int32), batch_axes)
        key = jax.random.fold_in(jax.random.key(seed), step)
        # Marked as different on every batch shard, parameters have local gradients, which are summed once, below.
        params = jax.tree.map(to_varying, params, missing)

        def gradient_of(params: Params, micro: Batch, key: jax.Array) -> tuple[Params, dict[str, jax.Array]]:
            return self._gradient(self.shard, params, teacher_params, micro, step, count, key)

        grads, sums = _over_micro_batches(gradient_of, params, batch, key)
        # Added up over micro-batches and shards in float32 or wider, and rounded to the parameters' type once.
        grads = jax.tree.map(lambda g, axes, p: psum(g.astype(_wide(p)), axes).astype(p.dtype), grads, missing, params)
        return grads, psum(sums, batch_axes), count

    def eval_body(
        self, params: Params, teacher_params: Params, batch: Batch, step: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """One shard's part of an evaluation: metric sums and the valid-token count of rows ``[B, L]``."""
        batch_axes = self.mapper.layout.batch_axes
        count = psum(jnp.sum(batch.mask, dtype=jnp.int32), batch_axes)
        return psum(self._loss(self.shard, params, teacher_params, batch, step, count, None)[1], batch_axes), count

    def _gradient(self, shard: Shard, params: Any, teacher_params: Any, *where: Any) -> Any:
        """This shard's gradient by ``params`` of a micro-batch's loss, and its metric sums."""
        return jax.grad(lambda p: self._loss(shard, p, teacher_params, *where), has_aux=True)(params)

    def _loss(
        self, shard: Shard, params: Any, teacher_params: Any, batch: Batch, step: Any, count: Any, key: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        targets = self.teacher.targets(teacher_params, batch, shard)
        student = self.student.apply(params, batch, shard, key)
        axes = {"batch_axes": shard.layout.batch_axes, "vocab_axes": shard.layout.vocab_axes}
        return self.objective(self.head, student, targets, batch, step, count, agreement=True, key=key, **axes)

    # -- around shard bodies: models that XLA cuts ----------------------------------------------------------------

    @property
    def foreign(self) -> bool:
        """Whether a model is not ours."""
        return any(isinstance(m, ForeignModel) for m in (self.student, self.teacher.model))

    def gradients(
        self, params: Params, teacher_params: Params, batch: Batch, step: jax.Array, seed: jax.Array
    ) -> tuple[Params, dict[str, jax.Array], jax.Array]:
        """What `train_body` returns, on global arrays: a shard body a micro-batch, and foreign models around it."""
        count = jnp.sum(batch.mask, dtype=jnp.int32)
        key = jax.random.fold_in(jax.random.key(seed), step)

        def gradient_of(params: Params, micro: Batch, key: jax.Array) -> tuple[Params, dict[str, jax.Array]]:
            teacher = self._ahead(self.teacher.model, teacher_params, micro, None)
            if not isinstance(self.student, ForeignModel):
                return self._inside(params, teacher, micro, step, count, key, with_gradient=True)
            student, pull = jax.vjp(lambda p: self._ahead(self.student, p, micro, key), params)
            grads, sums = self._inside(student, teacher, micro, step, count, key, with_gradient=True)
            return pull(jax.tree.map(lambda g, x: g.astype(x.dtype), grads, student))[0], sums

        grads, sums = _over_micro_batches(gradient_of, params, batch, key)
        return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params), sums, count

    def evaluation(
        self, params: Params, teacher_params: Params, batch: Batch, step: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """What `eval_body` returns, on global arrays, with foreign models before the shard body."""
        count = jnp.sum(batch.mask, dtype=jnp.int32)
        student = self._ahead(self.student, params, batch, None)
        teacher = self._ahead(self.teacher.model, teacher_params, batch, None)
        return self._inside(student, teacher, batch, step, count, None, with_gradient=False), count

    def _ahead(self, model: AnyModel, params: Params, batch: Batch, key: Any) -> Any:
        """What goes into a shard body for a model: a foreign model's outputs, our own model's parameters."""
        return model.forward(params, batch, self.mapper, key) if isinstance(model, ForeignModel) else params

    def _inside(
        self, student: Any, teacher: Any, batch: Batch, step: Any, count: Any, key: Any, *, with_gradient: bool
    ) -> Any:
        """Metric sums of rows ``[B, L]`` and, before them, the gradient by ``student``, summed over the batch axes."""
        layout = self.mapper.layout
        if any(isinstance(x, Unembedded) and x.has_logits for x in (student, teacher)):
            # Whoever has the logits of a token has them for all that the token's shard of ``model`` looks at.
            layout = replace(layout, rules=tuple((dict(layout.rules) | {"vocab": ("model",)}).items()))
        shard, models = Shard(layout, self.shard.dtype), (self.student, self.teacher.model)
        specs = tuple(
            model.handed(x, layout) if isinstance(model, ForeignModel) else model.specs(layout)
            for model, x in zip(models, (student, teacher), strict=True)
        )
        missing = self._unsharded_batch_axes(specs[0])

        def body(student: Any, teacher: Any, batch: Batch, step: Any, count: Any, key: Any) -> Any:
            if not with_gradient:
                return psum(self._loss(shard, student, teacher, batch, step, count, key)[1], layout.batch_axes)
            student = jax.tree.map(to_varying, student, missing)
            grads, sums = self._gradient(shard, student, teacher, batch, step, count, key)
            grads = jax.tree.map(lambda g, axes: psum(g.astype(_wide(g)), axes) if axes else g, grads, missing)
            return grads, psum(sums, layout.batch_axes)

        whole = (REPLICATED, REPLICATED, REPLICATED)
        out = (specs[0], REPLICATED) if with_gradient else REPLICATED
        return self.mapper.map(body, (*specs, self.batch_specs(0), *whole), out)(
            student, teacher, batch, step, count, key
        )

    # -- programs -------------------------------------------------------------------------------------------------

    def train_step(
        self, tx: optax.GradientTransformation, *, return_gradients: bool = False, skip: Skip = SKIP
    ) -> Callable[..., Any]:
        """Compile on first call: ``(state, teacher_params, batch [A, B, L]) -> (state, metrics)``.

        The state is donated. With ``return_gradients`` the gradients before clipping come as a third output. A step
        that ``skip`` stops keeps parameters and optimizer state bit for bit and advances the step's number alone: its
        batch and its random numbers are used up. Its metric ``skipped`` is 1. With ``skip.spike`` the step takes a
        fourth argument, the largest loss as a float32 scalar.
        """
        specs = self.student.specs(self.mapper.layout)
        given = (specs, self.teacher.model.specs(self.mapper.layout), self.batch_specs(1), REPLICATED, REPLICATED)
        out = (specs, REPLICATED, REPLICATED)
        body = self.gradients if self.foreign else self.mapper.map(self.train_body, given, out)

        def step(state: TrainState, teacher_params: Params, batch: Batch, *limit: jax.Array) -> Any:
            grads, sums, count = body(state.params, teacher_params, batch, state.step, state.seed)
            norm = optax.tree.norm(grads)
            ok = skip.ok(sums, count, norm, *limit or (jnp.inf,))
            params, opt_state = guarded_update(tx, grads, state.opt_state, state.params, ok)
            seen = {"grad_norm": norm, "skipped": 1 - ok.astype(jnp.int32)}
            metrics = _means(sums, count) | {name: Mean(x, jnp.int32(1)) for name, x in seen.items()}
            new = TrainState(state.step + 1, params, opt_state, state.seed)
            return (new, metrics, grads) if return_gradients else (new, metrics)

        whole, cut = self.mapper.shardings(REPLICATED), self.mapper.shardings(specs)
        state = self.mapper.shardings(self.state_specs(tx))
        out = (state, whole, cut) if return_gradients else (state, whole)
        return jax.jit(step, donate_argnums=0, out_shardings=out)

    def eval_step(self) -> Callable[[Params, Params, Batch, jax.Array], Metrics]:
        """Compile on first call: ``(params, teacher_params, batch [B, L], step) -> metrics``, sums over the batch."""
        layout = self.mapper.layout
        specs = (
            self.student.specs(layout),
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

    def batch_specs(self, leading: int) -> Batch:
        """Where a batch with ``leading`` dimensions before ``[B, L]`` lies: its rows over the batch axes."""
        spec = self.mapper.layout.spec((None,) * leading + ("batch", None))
        return Batch(*(spec,) * 5)  # type: ignore[arg-type]

    def state_specs(self, tx: optax.GradientTransformation) -> TrainState:
        """Where every part of the train state lies; the optimizer's moments follow their parameters."""
        specs = self.student.specs(self.mapper.layout)
        opt_state = optax.tree_utils.tree_map_params(
            tx,
            lambda _, spec: spec,
            jax.eval_shape(tx.init, self.student.abstract),
            specs,
            transform_non_params=lambda _: REPLICATED,
        )
        return TrainState(REPLICATED, specs, opt_state, REPLICATED)  # type: ignore[arg-type]

    def _unsharded_batch_axes(self, specs: Specs) -> Any:
        """For every array, the batch axes it is not cut over: those its gradient must be summed over."""
        return jax.tree.map(
            lambda spec: tuple(a for a in self.mapper.layout.batch_axes if a not in sharded_axes(spec)),
            specs,
            is_leaf=is_spec,
        )


def _over_micro_batches(
    gradient_of: Callable[[Params, Batch, jax.Array], Any], params: Params, batch: Batch, key: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """Add up ``gradient_of(params, micro-batch, key)``, a gradient and metric sums, over a batch ``[A, B, L]``."""

    def add(total: Any, more: Any) -> Any:
        return jax.tree.map(lambda t, m: t + m.astype(t.dtype), total, more)

    def accumulate(total: Any, numbered: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        number, micro = numbered
        return add(total, gradient_of(params, micro, jax.random.fold_in(key, number))), None

    micro_batches, first = batch.tokens.shape[0], jax.tree.map(lambda x: x[0], batch)
    if micro_batches == 1:
        return gradient_of(params, first, jax.random.fold_in(key, 0))
    _, sums = jax.eval_shape(gradient_of, params, first, key)
    zero_sums = jax.tree.map(lambda x: vary_like(jnp.zeros(x.shape, x.dtype), batch.mask), sums)
    start = (jax.tree.map(lambda p: jnp.zeros_like(p, _wide(p)), params), zero_sums)
    total, _ = jax.lax.scan(accumulate, start, (jnp.arange(micro_batches), batch))
    return total


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _means(sums: dict[str, jax.Array], count: jax.Array) -> Metrics:
    return {name: Mean(total, count) for name, total in sums.items()}
