"""The head that never holds logits: chunks of valid tokens, vocabulary-parallel, gradients in the forward pass.

Per chunk of C tokens and on each shard of the vocabulary (V rows of it):

1. logits of both models ``[C, V]``; from them, per token, the local maximum, sums of exponentials, the label's logit
   and the argmax: ONE all-gather of these rows gives every shard the global log-sum-exp of both models;
2. every term's integrand g and slope g' (its derivative by the student's log-probability), summed over the local
   vocabulary; one psum of the slopes' sums ``[terms, C]``;
3. with q = softmax(z / T), the logit gradient of a separable divergence is ``(g' - q * sum g') / T``; all terms add up
   in one dz ``[C, V]``, and ``dz @ unembed`` and ``dz.T @ hidden`` go into the two gradients, in float32.

Masked tokens are sorted to the end and never reach a matmul: the loop runs over ``ceil(valid / C)`` chunks. The
matmuls cost 4 N D V (forward 1 + teacher 1 + gradients 2), nothing is recomputed, and a value-only call costs 2.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_distill.collectives import all_gather, axis_index, copy_to, pmax, psum, to_varying, vary_like
from spmd_distill.divergences import AbstractSeparable, ForwardKL, integrand_and_slope
from spmd_distill.head.base import AGREEMENT, AbstractHead, HeadOutput, Term, accumulator, logits_of
from spmd_distill.types import LogitTransform, Unembedded

LIVE_BUFFERS = 6
"""Arrays of [chunk, V] that a chunk keeps alive at once, for turning a memory budget into a chunk size."""


@dataclass(frozen=True)
class FusedHead(AbstractHead):
    """See the module's docstring. ``chunk`` is in tokens; None chooses it from ``memory_budget`` (bytes a device)."""

    chunk: int | None = None
    memory_budget: int = 64 * 2**20
    name: str = "fused"

    def chunk_size(self, tokens: int, vocab: int, itemsize: int = 4) -> int:
        """Tokens a chunk, for ``tokens`` local tokens and ``vocab`` local rows of the unembedding."""
        if self.chunk is not None:
            return min(self.chunk, tokens)
        fits = max(self.memory_budget // (LIVE_BUFFERS * vocab * itemsize) // 8 * 8, 8)
        chunks = -(-tokens // fits)
        even = -(-tokens // chunks)  # a last chunk of few tokens would cost as much as a full one
        return min(-(-even // 8) * 8, tokens)

    def __call__(
        self,
        student: Unembedded,
        teacher: Unembedded,
        labels: jax.Array,
        mask: jax.Array,
        terms: tuple[Term, ...],
        weights: jax.Array,
        temperatures: jax.Array,
        *,
        agreement: bool,
        axis: str = "model",
        batch_axes: tuple[str, ...] = (),
    ) -> HeadOutput:
        """See `AbstractHead`."""
        program = _Program(
            terms,
            agreement,
            axis,
            batch_axes,
            self.chunk_size(mask.shape[0], student.unembed.shape[0]),
            student.transform,
            teacher.transform,
        )
        fused: Any = _fused
        loss, sums = fused(
            program,
            copy_to(student.hidden, axis),
            student.unembed,
            lax.stop_gradient(to_varying(teacher.hidden, axis)),
            lax.stop_gradient(teacher.unembed),
            labels,
            mask,
            weights,
            temperatures,
        )
        return HeadOutput(loss, dict(zip(program.names, sums, strict=True)))


@dataclass(frozen=True)
class _Program:
    """Everything about a call that is known when it is compiled."""

    terms: tuple[Term, ...]
    agreement: bool
    axis: str
    batch_axes: tuple[str, ...]
    chunk: int
    student: LogitTransform
    teacher: LogitTransform

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(t.divergence.name for t in self.terms) + (AGREEMENT if self.agreement else ())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(program: _Program, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, sums, _ = _walk(program, False, *arrays)
    return loss, sums


def _fused_fwd(program: _Program, *arrays: jax.Array):
    loss, sums, gradients = _walk(program, True, *arrays)
    hidden, unembed = arrays[:2]
    like = (jnp.zeros((), hidden.dtype), jnp.zeros((), unembed.dtype))
    return (loss, sums), (gradients, like)


def _fused_bwd(program: _Program, saved, cotangents):
    gradients, like = saved
    d_hidden, d_unembed = (
        (cotangents[0].astype(g.dtype) * g).astype(z.dtype) for g, z in zip(gradients, like, strict=True)
    )
    return d_hidden, d_unembed, *(None,) * 6


_fused.defvjp(_fused_fwd, _fused_bwd)


def _walk(program: _Program, with_gradients: bool, *arrays: jax.Array):
    """Loop over the chunks; return (loss, sums [names], (d_hidden [N, D], d_unembed [V, D]) or None)."""
    h_s, w_s, h_t, w_t, labels, mask, weights, temperatures = arrays
    (n, width), chunk, axis = h_s.shape, program.chunk, program.axis
    acc = accumulator(h_s, w_s)
    weights, temperatures = weights.astype(acc), temperatures.astype(acc)

    order = jnp.argsort(~mask, stable=True)  # valid tokens first, in their own order
    padded = -(-n // chunk) * chunk
    rows_of = jnp.concatenate([order, jnp.zeros(padded - n, order.dtype)])
    valid = jnp.sum(mask)
    # Shards of one model group must make the same number of trips; all shards do, because a device that ran ahead
    # would only wait for the others at the gradient's reduction.
    trips = pmax(-(-valid // chunk), program.batch_axes)

    def body(i: jax.Array, carry):
        sums, d_hidden, d_unembed = carry
        rows = lax.dynamic_slice_in_dim(rows_of, i * chunk, chunk)
        live = i * chunk + jnp.arange(chunk) < valid
        x_s, x_t = (jnp.where(live[:, None], h[rows], 0) for h in (h_s, h_t))
        more, dz = _chunk(program, with_gradients, x_s, w_s, x_t, w_t, labels[rows], live, weights, temperatures)
        if dz is not None:
            dz = dz.astype(x_s.dtype)
            dx = lax.dot(dz, w_s.astype(dz.dtype), preferred_element_type=acc)
            d_hidden = lax.dynamic_update_slice_in_dim(d_hidden, dx, i * chunk, 0)
            d_unembed = d_unembed + lax.dot_general(dz, x_s, (((0,), (0,)), ((), ())), preferred_element_type=acc)
        return sums + more, d_hidden, d_unembed

    start = jnp.zeros(len(program.names), acc)
    if with_gradients:
        start = (start, jnp.zeros((padded, width), acc), jnp.zeros(w_s.shape, acc))
    else:
        start = (start, jnp.zeros((), acc), jnp.zeros((), acc))
    start = vary_like(to_varying(start, axis), h_s, w_s, h_t, w_t, mask)
    sums, d_hidden, d_unembed = lax.fori_loop(0, trips, body, start)

    sums = psum(sums, axis)
    loss = jnp.sum(weights * sums[: len(program.terms)])
    if not with_gradients:
        return loss, sums, None
    back = jnp.zeros_like(order).at[order].set(jnp.arange(n, dtype=order.dtype))  # the inverse permutation
    return loss, sums, (d_hidden[back], d_unembed)


def _chunk(program: _Program, with_gradients: bool, x_s, w_s, x_t, w_t, labels, live, weights, temperatures):
    """Sums [names] of one chunk on this shard (to be added over shards), and dz [C, V] with respect to ``x @ w.T``."""
    axis, (rows, _) = program.axis, w_s.shape
    first_s, first_t = axis_index(axis) * rows, axis_index(axis) * w_t.shape[0]
    z_s, slope = logits_of(program.student, x_s, w_s, first_s)
    z_t, _ = logits_of(program.teacher, x_t, w_t, first_t)
    acc = z_s.dtype
    one = jnp.ones((), acc)

    # Temperatures to look at the logits through: 1 once, if anything needs it, and each term's own.
    views = [one] if program.agreement or any(t.static_temperature == 1.0 for t in program.terms) else []
    view_of_term = []
    for k, term in enumerate(program.terms):
        if term.static_temperature != 1.0:
            views.append(temperatures[k])
        view_of_term.append(0 if term.static_temperature == 1.0 else len(views) - 1)

    def local_statistics(z: jax.Array, first: jax.Array) -> list[jax.Array]:
        column = labels - first
        here = (column >= 0) & (column < z.shape[1])
        at = jnp.take_along_axis(z, jnp.clip(column, 0, z.shape[1] - 1)[:, None], axis=1)[:, 0]
        top = jnp.max(z, axis=1)
        exps = [jnp.sum(jnp.exp((z - top[:, None]) / t), axis=1) for t in views]
        return [top, (jnp.argmax(z, axis=1) + first).astype(acc), jnp.where(here, at, 0), *exps]

    both = [*local_statistics(z_s, first_s), *local_statistics(z_t, first_t)]
    per_model = 3 + len(views)
    stats = all_gather(jnp.stack(both), axis, tiled=False)  # [shards, 2 * per_model, C]

    def combine(stats: jax.Array):
        tops = stats[:, 0]
        top, winner = jnp.max(tops, axis=0), jnp.argmax(tops, axis=0)
        argmax = jnp.take_along_axis(stats[:, 1], winner[None], axis=0)[0]
        at_label = jnp.sum(stats[:, 2], axis=0)
        lse = [
            top / t + jnp.log(jnp.sum(stats[:, 3 + k] * jnp.exp((tops - top) / t), axis=0)) for k, t in enumerate(views)
        ]
        return argmax, at_label, lse

    argmax_s, label_s, lse_s = combine(stats[:, :per_model])
    argmax_t, label_t, lse_t = combine(stats[:, per_model:])
    log_s = [z_s / t - lse[:, None] for t, lse in zip(views, lse_s, strict=True)]
    log_t = [z_t / t - lse[:, None] for t, lse in zip(views, lse_t, strict=True)]
    first_shard = (axis_index(axis) == 0).astype(acc)  # what every shard knows is added by one of them only

    def over_vocabulary(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(live, jnp.sum(x, axis=1), 0))

    def per_token(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(live, x, 0)) * first_shard

    sums, slopes = [], []
    for term, view in zip(program.terms, view_of_term, strict=True):
        if isinstance(term.divergence, AbstractSeparable):
            value, g = integrand_and_slope(term.divergence, log_t[view], log_s[view])
            sums.append(over_vocabulary(value))
            slopes.append(g)
        else:
            sums.append(per_token(lse_s[0] - label_s))
            slopes.append(None)
    if program.agreement:
        sums += [
            over_vocabulary(ForwardKL().integrand(log_t[0], log_s[0])),
            per_token(lse_s[0] - label_s),
            per_token(lse_t[0] - label_t),
            per_token((argmax_s == argmax_t).astype(acc)),
            over_vocabulary(jnp.exp(jnp.minimum(log_s[0], log_t[0]))),
        ]
    sums = jnp.stack(sums)
    if not with_gradients:
        return sums, None

    totals = iter(_slope_totals([g for g in slopes if g is not None], axis))
    dz = jnp.zeros_like(z_s)
    for k, (g, view) in enumerate(zip(slopes, view_of_term, strict=True)):
        q = jnp.exp(log_s[view])
        if g is None:  # cross-entropy: q minus one at the label
            one_hot = (jnp.arange(rows) + first_s)[None, :] == labels[:, None]
            dz += weights[k] * (q - one_hot.astype(acc))
        else:
            dz += (weights[k] / views[view]) * (g - q * next(totals)[:, None])
    return sums, jnp.where(live[:, None], dz * slope, 0)


def _slope_totals(slopes: list[jax.Array], axis: str) -> jax.Array | list[jax.Array]:
    """Sum over the whole vocabulary of each term's slope, ``[terms, C]``."""
    return psum(jnp.stack([jnp.sum(g, axis=1) for g in slopes]), axis) if slopes else []
