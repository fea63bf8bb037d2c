"""The head that never holds logits: chunks of valid tokens, vocabulary-parallel, gradients in the forward pass.

Per chunk of C tokens and on each shard of the vocabulary (V rows of it): logits of both models ``[C, V]``, a few
numbers a token exchanged between shards, every term's value and its logit gradient dz ``[C, V]`` (`chunk_losses`); then
``dz @ unembed`` and ``dz.T @ hidden`` go into the two gradients, in float32.

Masked tokens are sorted to the end and never reach a matmul: the loop runs over ``ceil(valid / C)`` chunks. The
matmuls cost 4 N D V (forward 1 + teacher 1 + gradients 2), nothing is recomputed, and a value-only call costs 2.

Where the vocabulary is spread over axes that tokens are spread over too (a layout's rule ``vocab: [model, data]``),
those shards gather each other's chunk of hidden states, and scatter its gradient: no shard ever holds more of either
unembedding than what it stores, and the gradient of the unembedding is complete where it is computed.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_distill.collectives import (
    all_gather,
    axis_size,
    copy_to,
    pmax,
    psum,
    psum_scatter,
    to_varying,
    vary_like,
)
from spmd_distill.divergences import AbstractRowwise
from spmd_distill.head.base import AbstractHead, HeadOutput, Term, accumulator, common_vocabulary, settled
from spmd_distill.head.chunk import Program, chunk_losses
from spmd_distill.head.support import FULL, Support
from spmd_distill.types import Unembedded

LIVE_BUFFERS = 6
"""Arrays of [chunk, V] that a chunk keeps alive at once, for turning a memory budget into a chunk: the logits of both
models, dz, and on a CPU three exponentials and log-probabilities that later passes use again."""

TILE = 128
"""Tokens a chunk are a multiple of this where there are enough: the side of a TPU's matrix unit."""

ROWS_AT_ONCE = 4096
"""Rows of the unembedding whose gradient a CPU adds up at a time."""


@dataclass(frozen=True)
class FusedHead(AbstractHead):
    """See the module's docstring.

    ``chunk`` is in tokens whose logits a device looks at at once. Without it, ``memory_budget`` (bytes a device) says
    what a chunk's logits may take. Without either, a chunk is half as long as the student is wide: the logits of one
    model then take half of what the accumulated gradient of the unembedding takes anyway, and reading and writing that
    accumulator once a chunk costs a fixed, small part of the chunk's matmuls, whatever the vocabulary.
    """

    chunk: int | None = None
    memory_budget: int | None = None
    logits_dtype: str | None = None
    name: str = "fused"

    def chunk_size(self, tokens: int, vocab: int, width: int, itemsize: int = 4) -> int:
        """Tokens a chunk, of ``tokens`` that a device looks at with ``vocab`` rows of an unembedding of this width."""
        if self.chunk is not None:
            return min(self.chunk, tokens)
        fits = max(width // 2, TILE)
        if self.memory_budget is not None:
            fits = max(self.memory_budget // (LIVE_BUFFERS * vocab * itemsize), 8)
        tile = TILE if fits >= 4 * TILE else 8
        chunks = -(-tokens // (fits // tile * tile))
        even = -(-tokens // chunks)  # a last chunk of few tokens would cost as much as a full one
        return min(-(-even // tile) * tile, tokens)

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
        parameters: tuple[Mapping[str, Any], ...] = (),
        support: Support = FULL,
        uniforms: jax.Array | None = None,
        vocab_axes: tuple[str, ...] = ("model",),
        batch_axes: tuple[str, ...] = (),
    ) -> HeadOutput:
        """See `AbstractHead`."""
        student, teacher = common_vocabulary(student, teacher, terms)
        gathered = axis_size(tuple(a for a in vocab_axes if a in batch_axes))
        vocab = max(student.unembed.shape[0], teacher.unembed.shape[0])
        width, itemsize = student.unembed.shape[1], accumulator(student.hidden).itemsize
        chunk = -(-self.chunk_size(mask.shape[0] * gathered, vocab, width, itemsize) // gathered)
        if any(isinstance(t.divergence, AbstractRowwise) for t in terms):
            shards = axis_size(vocab_axes) // gathered
            chunk = -(-chunk // shards) * shards  # each shard gets as many of the tokens
        program = Program(terms, agreement, support, vocab_axes, batch_axes, chunk, self.logits_dtype)
        if not student.has_logits:
            student = student.replace(hidden=copy_to(student.hidden, "model"))  # type: ignore[attr-defined]
        fused: Any = _fused
        loss, sums = fused(
            program,
            student,
            jax.tree.map(lambda x: lax.stop_gradient(to_varying(x, "model")), teacher),
            labels,
            mask,
            weights,
            temperatures,
            parameters,
            uniforms,
        )
        return HeadOutput(loss, dict(zip(program.names, sums, strict=True)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(program: Program, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    loss, sums, _ = _walk(program, False, *arrays)
    return loss, sums


def _fused_fwd(program: Program, *arrays: Any):
    loss, sums, gradients = _walk(program, True, *arrays)
    like = jax.tree.map(lambda x: jnp.zeros((), x.dtype), arrays[0])
    return (loss, sums), (gradients, like)


def _fused_bwd(program: Program, saved: Any, cotangents: Any):
    gradients, like = saved
    student = jax.tree.map(lambda g, z: (cotangents[0].astype(g.dtype) * g).astype(z.dtype), gradients, like)
    student = lax.optimization_barrier(student)  # rounded now: the wide accumulator need not outlive the head
    return student, *(None,) * 7


_fused.defvjp(_fused_fwd, _fused_bwd)


def _walk(
    program: Program,
    with_gradients: bool,
    student: Unembedded,
    teacher: Unembedded,
    labels: jax.Array,
    mask: jax.Array,
    weights: jax.Array,
    temperatures: jax.Array,
    parameters: tuple[Mapping[str, Any], ...],
    uniforms: jax.Array | None,
):
    """Loop over the chunks; return (loss, sums [names], gradients shaped like ``student`` or None)."""
    (n, _), chunk = student.hidden.shape, program.chunk
    acc = accumulator(student.hidden, student.unembed)
    weights, temperatures = weights.astype(acc), temperatures.astype(acc)
    divergences = settled(program.terms, parameters)

    order = jnp.argsort(~mask, stable=True)  # valid tokens first, in their own order
    rows_of = jnp.concatenate([order, n + jnp.arange(-n % chunk, dtype=order.dtype)])  # past the end: no token
    valid = jnp.sum(mask)
    # Shards of one model group must make the same number of trips; all shards do, because a device that ran ahead
    # would only wait for the others at the gradient's reduction.
    trips = pmax(-(-valid // chunk), program.batch_axes)

    def body(i: jax.Array, carry: Any):
        sums, gradients = carry
        rows = lax.dynamic_slice_in_dim(rows_of, i * chunk, chunk)
        live = i * chunk + jnp.arange(chunk) < valid
        tokens = labels.at[rows].get(mode="clip"), live
        if uniforms is not None:
            tokens += (uniforms.at[rows].get(mode="clip").astype(acc),)
        x_s, x_t = (jnp.where(live[:, None], m.hidden.at[rows].get(mode="clip"), 0) for m in (student, teacher))
        x_s, x_t, tokens = _of_all(program, (x_s, x_t, tokens))
        models: Any = [m.replace(hidden=x) for m, x in ((student, x_s), (teacher, x_t))]  # type: ignore[attr-defined]
        more, dz = chunk_losses(program, with_gradients, models, tokens, weights, temperatures, divergences)
        if dz is not None:
            total, dz = gradients, dz.astype(x_s.dtype)
            gradients = total.replace(
                hidden=_hidden_gradient(program, dz, student.unembed, rows, total.hidden),
                unembed=_add_product(total.unembed, dz, x_s),
                bias=None if total.bias is None else total.bias + jnp.sum(dz, axis=0, dtype=acc),
            )
        return sums + more, gradients

    gradients: Any = None
    if with_gradients:
        gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, acc), student)
        # Written once, and rounded to this type anyway before shards add it up.
        gradients = gradients.replace(hidden=jnp.zeros_like(student.hidden))
    start = vary_like(
        to_varying((jnp.zeros(len(program.names), acc), gradients), "model"), student, teacher, mask, labels
    )
    sums, gradients = lax.fori_loop(0, trips, body, start)
    # Shards that looked at each other's tokens all hold the same sums: each keeps its equal share of them.
    sums = psum(sums, program.vocab_axes) / axis_size(program.gathered)
    # Of this shard, as its tokens are, also where the sum above made it equal on all: what is added to it later may
    # differ between shards, and its own gradient is not the sum of theirs.
    loss = vary_like(jnp.sum(weights * sums[: len(program.terms)]), mask)
    return loss, sums, gradients


def _of_all(program: Program, chunk: Any) -> Any:
    """The chunk of every shard that holds other tokens and other vocabulary than this one, one after the other."""
    for axis in reversed(program.gathered):
        chunk = jax.tree.map(lambda x, axis=axis: all_gather(x, axis), chunk)
    return chunk


def _hidden_gradient(
    program: Program, dz: jax.Array, unembed: jax.Array, rows: jax.Array, total: jax.Array
) -> jax.Array:
    """Write the gradient of this chunk's hidden states where its tokens stand; every token is written once."""
    if not unembed.shape[1]:  # the hidden states are the logits
        return total.at[rows].set(dz.astype(total.dtype), mode="drop", unique_indices=True)
    dx = lax.dot(dz, unembed.astype(dz.dtype), preferred_element_type=accumulator(dz))
    for axis in program.gathered:
        dx = psum_scatter(dx, axis)
    return total.at[rows].set(dx.astype(total.dtype), mode="drop", unique_indices=True)


def _add_product(total: jax.Array, dz: jax.Array, x: jax.Array) -> jax.Array:
    """``total [V, D] + dz.T @ x``."""
    if not total.shape[1]:
        return total

    def product(dz: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dot_general(dz, x, (((0,), (0,)), ((), ())), preferred_element_type=total.dtype)

    def at_once(total: jax.Array, dz: jax.Array, x: jax.Array) -> jax.Array:
        return total + product(dz, x)

    def by_rows(total: jax.Array, dz: jax.Array, x: jax.Array) -> jax.Array:
        # A CPU makes the product before it adds it: a part of the rows at a time keeps it from taking as much again.
        size = max(s for s in range(1, ROWS_AT_ONCE + 1) if total.shape[0] % s == 0)

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            part = product(lax.dynamic_slice_in_dim(dz, i * size, size, 1), x)
            return lax.dynamic_update_slice_in_dim(
                total, lax.dynamic_slice_in_dim(total, i * size, size) + part, i * size, 0
            )

        return lax.fori_loop(0, total.shape[0] // size, add, total)

    return lax.platform_dependent(total, dz, x, cpu=by_rows, default=at_once)
