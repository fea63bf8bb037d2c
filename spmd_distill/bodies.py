"""The training step and the evaluation step as what ONE shard does: loss, gradient, metric sums.

A mapper runs these bodies (``step.py``). A `ForeignModel` runs on global arrays, in the same program, before the body
(its gradient: after it). Inside the body, what it returned stands where a model of ours has parameters.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from spmd_distill.collectives import psum, to_varying, vary_like
from spmd_distill.features import Inside, Tokens, Trained
from spmd_distill.head import AbstractHead, FusedHead
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import DecoderConfig, Model, Shard, keys_of_rows
from spmd_distill.models.foreign import AnyModel, ForeignModel
from spmd_distill.objective import Objective
from spmd_distill.optimizer import filled, only
from spmd_distill.sharding import REPLICATED, Specs, is_spec, sharded_axes
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch, Params, Unembedded

__all__ = ["Bodies"]


@dataclass(frozen=True)
class Bodies:
    """A student, a teacher and an objective, on a mapper: what a shard does with them."""

    student: AnyModel
    teacher: OnlineTeacher
    objective: Objective
    mapper: AbstractMapper
    head: AbstractHead = field(default_factory=FusedHead)
    compute_dtype: Any = jnp.float32
    gradient_dtype: Any = jnp.float32
    """What gradients are added up in and come out in; float32 is float64 where the parameters are."""

    @property
    def shard(self) -> Shard:
        """The cut that both models run in."""
        return Shard(self.mapper.layout, jnp.dtype(self.compute_dtype))

    @functools.cached_property
    def inside(self) -> Inside:
        """The losses inside the network between the two models. Raises `UserError` where these have none such."""
        student, teacher = (_config_of(m) for m in (self.student, self.teacher.model))
        return self.objective.inside(student, teacher)

    @functools.cached_property
    def trained(self) -> Trained:
        """What a state's parameters are: the student's, and those of losses inside the network."""
        return Trained(self.student, self.inside.parameters)

    # -- shard bodies ---------------------------------------------------------------------------------------------

    def train_body(
        self,
        params: Params,
        teacher_params: Params,
        batch: Batch,
        step: jax.Array,
        seed: jax.Array,
        *scale: jax.Array,
        trained: Any = None,
    ) -> tuple[Params, dict[str, jax.Array], jax.Array]:
        """One shard's part of a step: gradients, metric sums and the valid-token count of micro-batches ``[A, B, L]``.

        Gradients come out summed over the batch axes and cut like the parameters: those of the loss times ``scale``, by
        the parameters that ``trained`` says (`UpdateRule.trained`).
        """
        batch_axes = self.mapper.layout.batch_axes
        missing = self._unsharded_batch_axes(self.trained.specs(self.mapper.layout))
        count = psum(jnp.sum(batch.mask, dtype=jnp.int32), batch_axes)
        key = jax.random.fold_in(jax.random.key(seed), step)
        # Marked as different on every batch shard, parameters have local gradients, which are summed once, below.
        params = jax.tree.map(to_varying, params, missing)
        moving, missing = only(trained, params), only(trained, missing)

        def gradient_of(moving: Params, micro: Batch, number: jax.Array) -> tuple[Params, dict[str, jax.Array]]:
            keys = keys_of_rows(key, len(micro.tokens), batch_axes, number)
            return self._gradient(self.shard, moving, params, teacher_params, micro, step, count, keys, *scale)

        grads, sums = self._over_micro_batches(gradient_of, moving, batch)
        # Added up over micro-batches and shards in this type, never in the type of parameters in fewer bits.
        grads = jax.tree.map(lambda g, axes, p: psum(g.astype(self._summed_in(p)), axes), grads, missing, moving)
        return grads, psum(sums, batch_axes), count

    def eval_body(
        self, params: Params, teacher_params: Params, batch: Batch, step: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """One shard's part of an evaluation: metric sums and the valid-token count of rows ``[B, L]``."""
        batch_axes = self.mapper.layout.batch_axes
        count = psum(jnp.sum(batch.mask, dtype=jnp.int32), batch_axes)
        return psum(self._loss(self.shard, params, teacher_params, batch, step, count, None)[1], batch_axes), count

    def _gradient(self, shard: Shard, moving: Any, params: Any, teacher_params: Any, *where: Any) -> Any:
        """This shard's gradient by ``moving``, some of ``params``, of a micro-batch's loss, and its metric sums."""
        return jax.grad(lambda p: self._loss(shard, filled(p, params), teacher_params, *where), has_aux=True)(moving)

    def _loss(
        self,
        shard: Shard,
        params: Any,
        teacher_params: Any,
        batch: Batch,
        step: Any,
        count: Any,
        keys: Any,
        scale: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        inside, (params, own) = self.inside, self.trained.parted(params)
        targets, theirs = self.teacher.targets(teacher_params, batch, shard, inside.teacher_taps)
        student, mine = self.student.apply_tapped(params, batch, shard, inside.student_taps, keys)
        sums = inside(mine, theirs, Tokens(batch.segments, batch.mask, shard), own)
        axes = {"batch_axes": shard.layout.batch_axes, "vocab_axes": shard.layout.vocab_axes}
        return self.objective(
            self.head, student, targets, batch, step, count, agreement=True, keys=keys, scale=scale, inside=sums, **axes
        )

    def _over_micro_batches(
        self,
        gradient_of: Callable[[Params, Batch, jax.Array], Any],
        params: Params,
        batch: Batch,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Add up ``gradient_of(params, micro-batch, its number)``, a gradient and metric sums, over ``[A, B, L]``."""

        def add(total: Any, more: Any) -> Any:
            return jax.tree.map(lambda t, m: t + m.astype(t.dtype), total, more)

        def accumulate(total: Any, numbered: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            number, micro = numbered
            return add(total, gradient_of(params, micro, number)), None

        numbers, first = jnp.arange(batch.tokens.shape[0]), jax.tree.map(lambda x: x[0], batch)
        if len(numbers) == 1:
            return gradient_of(params, first, numbers[0])
        _, sums = jax.eval_shape(gradient_of, params, first, numbers[0])
        zero_sums = jax.tree.map(lambda x: vary_like(jnp.zeros(x.shape, x.dtype), batch.mask), sums)
        start = (jax.tree.map(lambda p: jnp.zeros_like(p, self._summed_in(p)), params), zero_sums)
        total, _ = jax.lax.scan(accumulate, start, (numbers, batch))
        return total

    def _summed_in(self, x: jax.Array) -> jnp.dtype:
        """What gradients by ``x`` are added up in."""
        given = jnp.dtype(self.gradient_dtype)
        return given if given.itemsize < 4 else jnp.promote_types(x.dtype, given)

    # -- around shard bodies: models that XLA cuts ----------------------------------------------------------------

    @property
    def foreign(self) -> bool:
        """Whether a model is not ours."""
        return any(isinstance(m, ForeignModel) for m in (self.student, self.teacher.model))

    def gradients(
        self,
        params: Params,
        teacher_params: Params,
        batch: Batch,
        step: jax.Array,
        seed: jax.Array,
        *scale: jax.Array,
        trained: Any = None,
    ) -> tuple[Params, dict[str, jax.Array], jax.Array]:
        """What `train_body` returns, on global arrays: a shard body a micro-batch, and foreign models around it."""
        count = jnp.sum(batch.mask, dtype=jnp.int32)
        key = jax.random.fold_in(jax.random.key(seed), step)

        def gradient_of(moving: Params, micro: Batch, number: jax.Array) -> tuple[Params, dict[str, jax.Array]]:
            teacher = self._ahead(self.teacher.model, teacher_params, micro, None)
            where, its_key = (teacher, micro, step, count, (key, number), *scale), jax.random.fold_in(key, number)
            if not isinstance(self.student, ForeignModel):
                return self._inside(filled(moving, params), *where, trained=trained, with_gradient=True)
            student, pull = jax.vjp(lambda p: self._ahead(self.student, filled(p, params), micro, its_key), moving)
            grads, sums = self._inside(student, *where, with_gradient=True)
            return pull(jax.tree.map(lambda g, x: g.astype(x.dtype), grads, student))[0], sums

        moving = only(trained, params)
        grads, sums = self._over_micro_batches(gradient_of, moving, batch)
        return jax.tree.map(lambda g, p: g.astype(self._summed_in(p)), grads, moving), sums, count

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
        self,
        student: Any,
        teacher: Any,
        batch: Batch,
        step: Any,
        count: Any,
        drawn: Any,
        *scale: jax.Array,
        trained: Any = None,
        with_gradient: bool,
    ) -> Any:
        """Metric sums of rows ``[B, L]`` and, before them, the gradient by ``student``, summed over the batch axes.

        ``drawn``: the step's key and the number of the micro-batch; None in an evaluation.
        """
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

        def body(student: Any, teacher: Any, batch: Batch, step: Any, count: Any, drawn: Any, *scale: Any) -> Any:
            if not with_gradient:
                return psum(self._loss(shard, student, teacher, batch, step, count, None)[1], layout.batch_axes)
            keys = keys_of_rows(drawn[0], len(batch.tokens), layout.batch_axes, drawn[1])
            student = jax.tree.map(to_varying, student, missing)
            moving, summed = only(trained, student), only(trained, missing)
            grads, sums = self._gradient(shard, moving, student, teacher, batch, step, count, keys, *scale)
            added = lambda g, axes: psum(g.astype(self._summed_in(g)), axes) if axes else g  # noqa: E731
            return jax.tree.map(added, grads, summed), psum(sums, layout.batch_axes)

        whole = (REPLICATED,) * (3 + len(scale))
        out = (only(trained, specs[0]), REPLICATED) if with_gradient else REPLICATED
        return self.mapper.map(body, (*specs, self.batch_specs(0), *whole), out)(
            student, teacher, batch, step, count, drawn, *scale
        )

    # -- where things lie -----------------------------------------------------------------------------------------

    def batch_specs(self, leading: int) -> Batch:
        """Where a batch with ``leading`` dimensions before ``[B, L]`` lies: its rows over the batch axes."""
        spec = self.mapper.layout.spec((None,) * leading + ("batch", None))
        return Batch(*(spec,) * 5)  # type: ignore[arg-type]

    def _unsharded_batch_axes(self, specs: Specs) -> Any:
        """For every array, the batch axes it is not cut over: those its gradient must be summed over."""
        return jax.tree.map(
            lambda spec: tuple(a for a in self.mapper.layout.batch_axes if a not in sharded_axes(spec)),
            specs,
            is_leaf=is_spec,
        )


def _config_of(model: AnyModel) -> DecoderConfig | None:
    """The sizes of a decoder of ours, which has tap points; None for any other model."""
    config = model.config if isinstance(model, Model) else None
    return config if isinstance(config, DecoderConfig) else None
