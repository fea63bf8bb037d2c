"""A block of tokens at a time with others of their rows, so that no array of tokens by tokens is ever whole."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd_distill.collectives import axis_index, axis_size

BLOCK_BYTES = 32 * 2**20
"""What the scores of a block of tokens with all others of their rows may take."""

PARTS = 4
"""Into how many parts rows are cut that look at no token behind their end: 3/8 of the square is never computed."""


def block_length(batch: int, heads: int, length: int, itemsize: int = 4) -> int:
    """How many tokens to compare at a time with all of their row, for `BLOCK_BYTES`; a multiple of ``model``'s size."""
    shards = axis_size("model")
    most = max(1, BLOCK_BYTES // max(1, batch * heads * length * itemsize))
    return min(math.ceil(length / shards), max(1, most // shards)) * shards


def over_blocks(
    rows: Callable[[jax.Array], Float[Array, "B M *rest"]], length: int, block: int
) -> Float[Array, "B N *rest"]:
    """``rows(begin)`` of every block of ``block`` tokens of a row, one at a time, side by side.

    The backward pass computes a block again instead of keeping it. The last block may reach beyond ``length``.
    """
    begins = jnp.arange(0, length, block)
    found = jax.lax.map(jax.checkpoint(rows), begins)
    return jnp.moveaxis(found, 0, 1).reshape(found.shape[1], -1, *found.shape[3:])


def over_parts(
    until: Callable[[int], Callable[[jax.Array], Float[Array, "B M *rest"]]], count: int, block: int
) -> Float[Array, "B N *rest"]:
    """As `over_blocks` of ``count`` blocks that look at no token behind them.

    ``until(end)`` is the function of a block's begin, for blocks that lie before ``end``: rows are cut in `PARTS`, each
    of which leaves out what comes after it.
    """
    found, done = [], 0
    for part in sorted({-(-count * (n + 1) // PARTS) for n in range(PARTS)}):
        rows, first = until(part * block), done * block
        found.append(over_blocks(lambda b, rows=rows, first=first: rows(b + first), (part - done) * block, block))
        done = part
    return jnp.concatenate(found, axis=1)


class Blocks:
    """Tokens of a row in blocks of equal size, of which every shard of ``model`` has a part, or all has each.

    Arrays of all tokens are ``[B, P, ...]`` here, P being their number and what it takes to fill the last block; those
    of this shard's tokens are ``[B, own, ...]``, own being P / shards.
    """

    def __init__(self, length: int, largest: int, *, spread: bool = True):
        """``largest``: at most so many tokens a block, a multiple of the shards (`block_length`); ``spread``: shards
        have parts of them.
        """
        self.length, self.shards = length, axis_size("model") if spread else 1
        self.count = math.ceil(length / largest)
        self.rows = math.ceil(length / self.count / self.shards)
        """How many tokens of a block are this shard's."""
        self.block = self.rows * self.shards

    def filled(self, x: Array, fill: Any = 0) -> Array:
        """``[B, P, ...]`` of the tokens, of which there may be some more than the length."""
        x = x[:, : self.length]
        more = [(0, 0), (0, self.count * self.block - self.length)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, more, constant_values=fill)

    def divided(self, x: Array) -> Array:
        """``[B, count, shards, rows, ...]`` of ``[B, P, ...]``."""
        return x.reshape(x.shape[0], self.count, self.shards, self.rows, *x.shape[2:])

    def own(self, x: Array) -> Array:
        """Of ``[B, P, ...]``, known to every shard: its own tokens."""
        here = axis_index("model") if self.shards > 1 else 0
        x = jax.lax.dynamic_index_in_dim(self.divided(x), here, 2, keepdims=False)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def mine(self, x: Array, begin: jax.Array) -> Array:
        """Of ``[B, own, ...]``: those of the block that begins with the token ``begin``."""
        return jax.lax.dynamic_slice_in_dim(x, begin // self.shards, self.rows, 1)
