"""One term on one chunk: what of it must be summed over the vocabulary, its value, and the gradient of the logits.

A separable divergence costs one formula whatever its support. With g' its slope (the derivative of its integrand by the
student's log-probability) and q = softmax(z / T), its gradient by the logits is ``(g' - q * sum g') / T``.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_distill.collectives import all_to_all, axis_index, axis_size, gather_stacked, shard_index
from spmd_distill.divergences import (
    AbstractDivergence,
    AbstractRowwise,
    AbstractSeparable,
    CrossEntropy,
    ZLoss,
    integrand_and_slope,
)
from spmd_distill.errors import UserError
from spmd_distill.head.base import LOWEST
from spmd_distill.head.support import Sampled, Support, TopK
from spmd_distill.head.vocabulary import Side, local_columns, put


@dataclass(frozen=True)
class Part:
    """A term, between the pass over the logits that makes its sums and the one that makes its gradient."""

    entries: Sequence[jax.Array]
    """Arrays [C, V] whose sums over this shard's vocabulary are wanted."""
    value: Callable[..., jax.Array]
    """From those sums [C]: this shard's share of the term, a scalar."""
    gradient: Callable[[Any], jax.Array] | None = None
    """From the slope's sum over the WHOLE vocabulary (if ``slope_sum`` names one): d value / d (z / T), [C, V].
    None for what is only measured."""
    slope_sum: int | jax.Array | None = None
    """Which of the sums must be completed over all shards, or this shard's share of it [C], for the gradient."""


@dataclass(frozen=True)
class Chunk:
    """Both models' logits of C tokens on one shard, at every temperature in use."""

    student: Side
    teacher: Side
    labels: jax.Array
    live: jax.Array
    axes: tuple[str, ...]
    support: Support
    uniforms: jax.Array | None

    def share(self, x: jax.Array) -> jax.Array:
        """Sum over live tokens of what is this shard's own part, ``[C]``."""
        return jnp.sum(jnp.where(self.live, x, 0))

    def once(self, x: jax.Array) -> jax.Array:
        """Sum over live tokens of what every shard knows, ``[C]``: added by one shard only."""
        return self.share(x) * (shard_index(self.axes) == 0).astype(x.dtype)

    def part(self, divergence: AbstractDivergence, view: int) -> Part:
        """The term ``divergence`` at the temperature numbered ``view``."""
        if isinstance(divergence, AbstractRowwise):
            return self._rowwise(divergence, view)
        if isinstance(divergence, CrossEntropy):
            return self._cross_entropy(divergence.label_smoothing, view)
        if isinstance(divergence, ZLoss):
            lse = self.student.lse(view)
            gradient = lambda _: 2 * lse[:, None] * self.student.prob(view)  # noqa: E731
            return Part((), lambda: self.once(jnp.square(lse)), gradient)
        if not isinstance(divergence, AbstractSeparable):
            raise UserError(
                f"The fused head has no code for {type(divergence).__name__}; a divergence is a subclass of "
                f"AbstractSeparable or AbstractRowwise."
            )
        if isinstance(self.support, TopK):
            return self._top(divergence, view)
        if isinstance(self.support, Sampled):
            return self._sampled(divergence, view, self.support)
        value, g = integrand_and_slope(divergence, self.teacher.logp(view), self.student.logp(view))
        if divergence.slopes_cancel:
            return Part((value,), self.share, lambda _: g)
        return Part((value, g), lambda total, _: self.share(total), self._from_slope(g, view), 1)

    def _from_slope(self, g: jax.Array, view: int) -> Callable[[Any], jax.Array]:
        return lambda total: g - self.student.prob(view) * total[:, None]

    def _cross_entropy(self, even: Any, view: int) -> Part:
        s = self.student
        columns = jnp.arange(s.z.shape[1]) + s.first
        hard = s.surprise(view)
        one_hot = (columns[None] == self.labels[:, None]).astype(s.z.dtype)
        if isinstance(even, int | float) and not even:
            return Part((), lambda: self.once(hard), lambda _: s.prob(view) - one_hot)
        target = jnp.where(columns < s.vocab_size, 1 / s.vocab_size, 0).astype(s.z.dtype)
        return Part(
            (-s.logp(view) * target,),
            lambda spread: (1 - even) * self.once(hard) + even * self.share(spread),
            lambda _: s.prob(view) - (1 - even) * one_hot - even * target,
        )

    def _top(self, divergence: AbstractSeparable, view: int) -> Part:
        """Over k tokens and one bucket b of all others, among which the bucket's slope is divided as q is."""
        s, t, cold = self.student, self.teacher, self.student.colds[view]

        def bucketed(side: Side) -> jax.Array:
            inside = (side.inside - side.top[:, None]) * cold
            log = jnp.concatenate([inside, side.outside[view][:, None]], axis=1)
            return jnp.maximum(log - side.log_sum[view][:, None], LOWEST)

        value, g = integrand_and_slope(divergence, bucketed(t), bucketed(s))
        total = jnp.sum(g, axis=1)

        def gradient(_: Any) -> jax.Array:
            divided = jnp.exp(jnp.minimum(s.scaled(view) - s.outside[view][:, None], 0))
            slope = put(g[:, -1:] * divided, local_columns(s.tokens, s.first, s.z.shape[1]), g[:, :-1])
            return self._from_slope(slope, view)(total)

        return Part((), lambda: self.once(jnp.sum(value, axis=1)), gradient)

    def _sampled(self, divergence: AbstractSeparable, view: int, support: Sampled) -> Part:
        """Over tokens drawn by inverting the cumulated proposal, one in each of n equal strata of it."""
        if self.uniforms is None:
            raise UserError("A Sampled support needs random numbers: pass uniforms [N, draws] to the head.")
        log_p, log_q = self.teacher.logp(view), self.student.logp(view)
        fraction, draws = support.teacher_fraction, support.draws
        proposal = fraction * jnp.exp(log_p) + (1 - fraction) * jnp.exp(log_q)
        ends = jnp.cumsum(gather_stacked(jnp.sum(proposal, axis=1), self.axes), axis=0)  # [shards, C]
        total, mine = ends[-1], shard_index(self.axes)
        begin = jnp.where(mine > 0, ends[jnp.maximum(mine - 1, 0)], 0)
        point = (jnp.arange(draws) + self.uniforms) / draws * total[:, None]
        here = (point >= begin[:, None]) & (point < ends[mine][:, None])
        find = jax.vmap(functools.partial(jnp.searchsorted, side="right", method="sort"))
        column = find(jnp.cumsum(proposal, axis=1), point - begin[:, None])
        take = functools.partial(jnp.take_along_axis, indices=jnp.minimum(column, proposal.shape[1] - 1), axis=1)
        chance = take(proposal) / total[:, None]
        weight = jnp.where(here & (chance > 0), 1 / (draws * jnp.where(chance > 0, chance, 1)), 0)
        value, g = integrand_and_slope(divergence, take(log_p), take(log_q))
        rows = jnp.arange(column.shape[0])[:, None]
        slope = jnp.zeros_like(log_q).at[rows, take.keywords["indices"]].add(weight * g)
        own = jnp.sum(weight * g, axis=1)
        return Part((), lambda: self.share(jnp.sum(weight * value, axis=1)), self._from_slope(slope, view), own)

    def _rowwise(self, divergence: AbstractRowwise, view: int) -> Part:
        """The shards exchange logits, so that each holds the whole vocabulary of C / shards tokens.

        The gradient goes the way back. A chunk is the most that is ever in flight.
        """
        s, t, cold = self.student, self.teacher, self.student.colds[view]

        def whole(side: Side) -> jax.Array:
            z = side.z * cold
            for axis in reversed(self.axes):
                z = all_to_all(z, axis, split=0, concat=1)
            return jnp.maximum(z[:, : side.vocab_size], LOWEST)

        mine = self.live
        for axis in reversed(self.axes):
            size = mine.shape[0] // axis_size(axis)
            mine = lax.dynamic_slice_in_dim(mine, axis_index(axis) * size, size)
        z_t = whole(t)
        value, pull = jax.vjp(lambda z: divergence.per_token(z_t, z), whole(s))

        def gradient(_: Any) -> jax.Array:
            (d_z,) = pull(mine.astype(value.dtype))
            d_z = jnp.pad(d_z, ((0, 0), (0, s.z.shape[1] * axis_size(self.axes) - d_z.shape[1])))
            for axis in self.axes:
                d_z = all_to_all(d_z, axis, split=1, concat=0)
            return d_z

        return Part((), lambda: jnp.sum(jnp.where(mine, value, 0)), gradient)
