"""Causal attention inside packed segments, a block of queries at a time: memory grows with the length alone."""

import math

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

SCORES = 32 * 2**20
"""Bytes that the scores of a block may take; rows of the batch are looked at in groups to stay within it."""

PARTS = 4
"""Into how many parts a long row is cut that look at no key behind their end: 3/8 of the square is never computed."""

ATTENDED = "attended"
"""The name of what attention returns, for remat policies."""


def attend(
    q: Float[Array, "B L H C"],
    k: Float[Array, "B L K C"],
    v: Float[Array, "B L K C"],
    segments: Int[Array, "B L"],
    block: int = 512,
) -> Float[Array, "B L H C"]:
    """Scaled dot-product attention with H / K query heads a key/value head; scores and softmax in float32 or wider.

    A token sees the tokens before it in its own segment, and itself; padding (segment 0) sees only padding. Queries are
    taken ``block`` at a time, with the keys up to the end of their quarter of the row, and the backward pass computes
    scores again instead of keeping them. Up to ``block`` tokens it is the textbook formula.

    Not `jax.nn.dot_product_attention`: that one takes its softmax in float32 whatever the input, which would hide
    sharding mistakes below 1e-7 from the float64 proofs.
    """
    length = q.shape[1]
    if length <= block:
        return checkpoint_name(_block(q, k, v, segments, segments, 0), ATTENDED)

    # Parts of the row are written out, each with the keys up to its end; the blocks of a part are a loop, because a
    # compiler may have everything that is written out alive at once.
    blocks = -(-length // block)
    ends = [min(block * (-(-blocks * (i + 1) // PARTS)), length) for i in range(min(PARTS, blocks))]
    part = jax.checkpoint(_block)

    def rows(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        out, begin = [], 0
        for end in sorted(set(ends)):
            keys = k[:, :end], v[:, :end], segments[:, :end]
            count = (end - begin) // block
            if count > 1:
                queries, whose = (_cut(x[:, begin : begin + count * block], count) for x in (q, segments))
                begins = begin + block * jnp.arange(count)
                found = jax.lax.map(lambda xs, keys=keys: part(xs[0], *keys, xs[1], xs[2]), (queries, whose, begins))
                out.append(rearrange(found, "n b m h c -> b (n m) h c"))
                begin += count * block
            if begin < end:
                out.append(part(q[:, begin:end], *keys, segments[:, begin:end], begin))
            begin = end
        return jnp.concatenate(out, axis=1)

    batch = q.shape[0]
    a_row = q.shape[2] * block * length * jnp.promote_types(q.dtype, jnp.float32).itemsize
    group = max(n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * a_row <= SCORES))
    if group == batch:
        return checkpoint_name(rows(q, k, v, segments), ATTENDED)
    grouped = [x.reshape(batch // group, group, *x.shape[1:]) for x in (q, k, v, segments)]
    out = jax.lax.map(lambda xs: rows(*xs), tuple(grouped))
    return checkpoint_name(out.reshape(q.shape), ATTENDED)


def _cut(x: jax.Array, count: int) -> jax.Array:
    """``[B, count * M, ...]`` as ``[count, B, M, ...]``."""
    return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)


def _block(
    q: Float[Array, "B M H C"],
    k: Float[Array, "B N K C"],
    v: Float[Array, "B N K C"],
    k_segments: Int[Array, "B N"],
    q_segments: Int[Array, "B M"],
    begin: int | Int[Array, ""],
) -> Float[Array, "B M H C"]:
    """Queries at positions ``begin ...`` of their rows, against keys from position 0 on."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    causal = (begin + jnp.arange(q.shape[1]))[:, None] >= jnp.arange(k.shape[1])
    seen = causal & (q_segments[:, :, None] == k_segments[:, None, :])
    grouped = rearrange(q, "b m (k g) c -> b m k g c", k=k.shape[2])
    scores = jnp.einsum("bmkgc,bnkc->bkgmn", grouped, k, preferred_element_type=wide) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1).astype(q.dtype)
    return rearrange(jnp.einsum("bkgmn,bnkc->bmkgc", weights, v), "b m k g c -> b m (k g) c")
