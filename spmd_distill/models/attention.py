"""Causal attention inside packed segments, a block of queries at a time: memory grows with the length alone."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from spmd_distill.errors import UserError

SCORES = 32 * 2**20
"""Bytes that the scores of a block may take; rows of the batch are looked at in groups to stay within it."""

PARTS = 4
"""Into how many parts a long row is cut that look at no key behind their end: 3/8 of the square is never computed."""

ATTENDED = "attended"
"""The name of what attention returns, for remat policies."""

KERNELS = ("blockwise", "xla", "cudnn")
"""What computes a block: this file, in float32 or wider; `jax.nn.dot_product_attention` as XLA compiles it; the same on
an NVIDIA GPU by cuDNN's flash attention, for bfloat16 and float16. (JAX's flash kernels for TPUs do not say over which
mesh axes their results vary, which `jax.shard_map` insists on.)"""

Window = int | Int[Array, ""] | None
"""How many tokens a token sees, itself included; None for all before it. An array where layers of a scan differ."""


@dataclass(frozen=True)
class Scores:
    """How the product of a query and a key becomes a score."""

    scale: float | None = None
    """Factor on the product; None is ``1 / sqrt(head_dim)``."""
    softcap: float | None = None
    """Gemma 2's ``cap * tanh(score / cap)``, before the mask."""
    kernel: str = "blockwise"
    """One of `KERNELS`."""


PLAIN = Scores()


def attend(
    q: Float[Array, "B L H C"],
    k: Float[Array, "B L K C"],
    v: Float[Array, "B L K C"],
    segments: Int[Array, "B L"],
    block: int = 512,
    scores: Scores = PLAIN,
    window: Window = None,
) -> Float[Array, "B L H C"]:
    """Scaled dot-product attention with H / K query heads a key/value head; scores and softmax in float32 or wider.

    A token sees the tokens before it in its own segment (of those the nearest ``window``), and itself; padding (segment
    0) sees only padding. Queries are taken ``block`` at a time, with the keys up to the end of their quarter of the
    row, and the backward pass computes scores again instead of keeping them. A window that is a number leaves out the
    keys before it, so that a long row costs its length times the window. Up to ``block`` tokens it is the textbook
    formula.

    Not `jax.nn.dot_product_attention` by default: that one takes its softmax in float32 whatever the input, which would
    hide sharding mistakes below 1e-7 from the float64 proofs. Raises `UserError` for a kernel that is not to be had.
    """
    length = q.shape[1]
    if length <= block:
        return checkpoint_name(_block(scores, q, k, v, segments, segments, 0, 0, window), ATTENDED)

    def rows(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        if isinstance(window, int) and window + block < length / 2:
            return _in_a_window(scores, q, k, v, segments, block, window)
        return _in_parts(scores, q, k, v, segments, block, window)

    batch = q.shape[0]
    a_row = q.shape[2] * block * length * jnp.promote_types(q.dtype, jnp.float32).itemsize
    group = max(n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * a_row <= SCORES))
    if group == batch:
        return checkpoint_name(rows(q, k, v, segments), ATTENDED)
    grouped = [x.reshape(batch // group, group, *x.shape[1:]) for x in (q, k, v, segments)]
    out = jax.lax.map(lambda xs: rows(*xs), tuple(grouped))
    return checkpoint_name(out.reshape(q.shape), ATTENDED)


def attend_cached(
    q: Float[Array, "B M H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K C"],
    q_segments: Int[Array, "B M"],
    k_segments: Int[Array, "B S"],
    begin: int | Int[Array, ""],
    scores: Scores = PLAIN,
    window: Window = None,
) -> Float[Array, "B M H C"]:
    """Attention of the M tokens in the columns from ``begin`` on, to the S columns of a cache, as in `attend`."""
    return _block(scores, q, k, v, k_segments, q_segments, begin, 0, window)


def _in_parts(
    scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, block: int, window: Window
) -> jax.Array:
    """Rows in parts that are written out, each with the keys up to its end.

    The blocks of a part are a loop, because a compiler may have everything that is written out alive at once.
    """
    length = q.shape[1]
    blocks = -(-length // block)
    ends = [min(block * (-(-blocks * (i + 1) // PARTS)), length) for i in range(min(PARTS, blocks))]
    part = jax.checkpoint(_block, static_argnums=0)
    out, begin = [], 0
    for end in sorted(set(ends)):
        keys = k[:, :end], v[:, :end], segments[:, :end]
        count = (end - begin) // block
        if count > 1:
            queries, whose = (_cut(x[:, begin : begin + count * block], count) for x in (q, segments))
            begins = begin + block * jnp.arange(count)
            found = jax.lax.map(
                lambda xs, keys=keys: part(scores, xs[0], *keys, xs[1], xs[2], 0, window), (queries, whose, begins)
            )
            out.append(rearrange(found, "n b m h c -> b (n m) h c"))
            begin += count * block
        if begin < end:
            out.append(part(scores, q[:, begin:end], *keys, segments[:, begin:end], begin, 0, window))
        begin = end
    return jnp.concatenate(out, axis=1)


def _in_a_window(
    scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, block: int, window: int
) -> jax.Array:
    """Rows in blocks, each with the ``window - 1`` keys before it and its own: one loop over all of them."""
    length = q.shape[1]
    count = -(-length // block)
    behind = -(-(window - 1) // 8) * 8
    part = jax.checkpoint(_block, static_argnums=0)
    # Columns before the row and behind it belong to no segment that a token could be in.
    q, k, v = (jnp.pad(x, ((0, 0), (0, count * block - length), (0, 0), (0, 0))) for x in (q, k, v))
    own = jnp.pad(segments, ((0, 0), (0, count * block - length)), constant_values=-1)
    k, v = (jnp.pad(x, ((0, 0), (behind, 0), (0, 0), (0, 0))) for x in (k, v))
    theirs = jnp.pad(own, ((0, 0), (behind, 0)), constant_values=-2)

    def one(xs: Any) -> jax.Array:
        queries, whose, begin = xs
        keys = (jax.lax.dynamic_slice_in_dim(x, begin, behind + block, 1) for x in (k, v, theirs))
        return part(scores, queries, *keys, whose, begin, begin - behind, window)

    found = jax.lax.map(one, (_cut(q, count), _cut(own, count), block * jnp.arange(count)))
    return rearrange(found, "n b m h c -> b (n m) h c")[:, :length]


def _cut(x: jax.Array, count: int) -> jax.Array:
    """``[B, count * M, ...]`` as ``[count, B, M, ...]``."""
    return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)


def _block(
    scores: Scores,
    q: Float[Array, "B M H C"],
    k: Float[Array, "B N K C"],
    v: Float[Array, "B N K C"],
    k_segments: Int[Array, "B N"],
    q_segments: Int[Array, "B M"],
    begin: int | Int[Array, ""],
    k_begin: int | Int[Array, ""],
    window: Window,
) -> Float[Array, "B M H C"]:
    """Queries in the columns ``begin ...`` of their rows, against keys in the columns ``k_begin ...``."""
    ahead = (begin + jnp.arange(q.shape[1]))[:, None] - (k_begin + jnp.arange(k.shape[1]))
    near = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
    seen = near & (q_segments[:, :, None] == k_segments[:, None, :])
    if scores.kernel != "blockwise":
        return _by_kernel(scores, q, k, v, seen)
    z = masked_scores(scores, q, k, seen)
    weights = jax.nn.softmax(z, axis=-1).astype(q.dtype)
    return rearrange(jnp.einsum("bkgmn,bnkc->bmkgc", weights, v), "b m k g c -> b m (k g) c")


def masked_scores(
    scores: Scores, q: Float[Array, "B M H C"], k: Float[Array, "B N K C"], seen: Bool[Array, "B M N"]
) -> Float[Array, "B K G M N"]:
    """What the softmax over keys is taken of, in float32 or wider; far below everything where a key is not ``seen``."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = rearrange(q, "b m (k g) c -> b m k g c", k=k.shape[2])
    z = jnp.einsum("bmkgc,bnkc->bkgmn", grouped, k, preferred_element_type=wide)
    z = z / math.sqrt(q.shape[-1]) if scores.scale is None else z * scores.scale
    if scores.softcap is not None:
        z = scores.softcap * jnp.tanh(z / scores.softcap)
    return jnp.where(seen[:, None, None], z, -1e30)


def _by_kernel(scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    if scores.kernel == "cudnn" and q.dtype not in (jnp.bfloat16, jnp.float16):
        raise UserError(f"Attention by cuDNN computes in bfloat16 or float16, found {q.dtype}. Set precision.compute.")
    how: Any = scores.kernel
    try:
        return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=scores.scale, implementation=how)
    except RuntimeError as error:  # of JAX's own check of GPU and cuDNN
        raise UserError(
            f"Attention by {scores.kernel} is not to be had on {jax.devices()[0].platform} ({error}) Choose blockwise."
        ) from error
