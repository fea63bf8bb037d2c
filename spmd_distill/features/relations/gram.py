"""Relations between tokens of a document from the Gram matrix of their features, a block of its rows at a time.

Every shard of ``model`` has its own channels of all tokens. Products of a block of rows with those before them are
partial sums, which a reduce-scatter completes: each shard then has some of the block's rows whole. Neither features
nor a matrix of tokens by tokens are ever gathered.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from spmd_distill.collectives import axis_index, copy_to, reduce_from, scatter_to
from spmd_distill.features.base import Tokens, wide
from spmd_distill.features.blocks import Blocks, block_length, over_parts
from spmd_distill.features.documents import Documents

SHORTEST = 1e-6
"""Length up to which a vector has no direction."""

Compare = Callable[[Sequence[Any], Any, Bool[Array, "B M N"], Bool[Array, "B M N"]], Float[Array, "B M *rest"]]


class TokenPairs(Blocks):
    """Pairs (i, j) of valid tokens of one document with j up to i, by blocks of tokens i."""

    def __init__(self, tokens: Tokens, dtype: Any):
        """``dtype``: of the features that are to come."""
        batch, length = tokens.segments.shape
        itemsize = jnp.promote_types(dtype, jnp.float32).itemsize
        super().__init__(length, block_length(batch, 2, length, itemsize))
        self.segments = self.filled(tokens.segments)
        self.valid = self.filled(tokens.valid & (tokens.segments > 0))
        self.own_segments, self.own_valid = self.own(self.segments), self.own(self.valid)
        self.documents = Documents(self.segments, length)
        self.own_documents = Documents(self.own_segments, length)

    def features(self, x: Float[Array, "B Lx Dm"]) -> Float[Array, "B P Dm"]:
        """In float32 or wider, with zeros for tokens that are not valid, of this shard's channels of all tokens."""
        return jnp.where(self.valid[..., None], self.filled(wide(x)), 0)

    def map(
        self, compare: Compare, features: Sequence[tuple[jax.Array, jax.Array]], mine: Any = ()
    ) -> Float[Array, "B own *rest"]:
        """``compare(products, mine, related, itself)`` of every block of this shard's tokens i with N tokens j.

        ``products`` has, for each of ``features``, the inner products of the first's tokens i with the second's j,
        ``[B, M, N]``. ``mine`` is a pytree of arrays of the tokens i. ``related`` are the pairs, and ``itself`` those
        of them with i = j. What comes back has ``[B, M, ...]``. The backward pass computes a block again.
        """
        mine = mine, self.own_segments, self.own_valid
        return over_parts(lambda end: self._until(end, compare, features, mine), self.count, self.block)

    def _until(
        self, end: int, compare: Compare, features: Sequence[tuple[jax.Array, jax.Array]], mine: Any
    ) -> Callable[[jax.Array], jax.Array]:
        """The function of a block's begin, for blocks that lie before ``end``."""
        before = [(queries, keys[:, :end]) for queries, keys in features]
        segments, valid, places = self.segments[:, None, :end], self.valid[:, None, :end], jnp.arange(end)

        def one(begin: jax.Array) -> jax.Array:
            products = [self._products(queries, keys, begin) for queries, keys in before]
            values, own_segments, own_valid = jax.tree.map(lambda x: self.mine(x, begin), mine)
            i = begin + axis_index("model") * self.rows + jnp.arange(self.rows)
            ahead = i[:, None] - places
            related = (own_segments[..., None] == segments) & own_valid[..., None] & valid & (ahead >= 0)
            return compare(products, values, related, related & (ahead == 0))

        return one

    def _products(self, queries: jax.Array, keys: jax.Array, begin: jax.Array) -> jax.Array:
        queries = jax.lax.dynamic_slice_in_dim(queries, begin, self.block, 1)
        # whole float32 also where matrix units round: what is looked for are small differences of large numbers
        partial = jnp.einsum("bmd,bnd->bmn", queries, keys, precision=jax.lax.Precision.HIGHEST)
        return scatter_to(partial, "model", 1)


def squared_lengths(x: Float[Array, "B P Dm"]) -> Float[Array, "B P"]:
    """Of tokens whose channels are cut over ``model``; known to every shard, for use in its own part."""
    return copy_to(reduce_from(jnp.sum(jnp.square(x), -1), "model"), "model")


def directions(x: Float[Array, "B P Dm"]) -> Float[Array, "B P Dm"]:
    """At length 1 (this shard's channels of it); zeros, without a gradient, for tokens up to `SHORTEST`."""
    squares = squared_lengths(x)
    some = (squares > SHORTEST**2) & (squares < jnp.inf)
    x, squares = jnp.where(some[..., None], x, 0), jnp.where(some, squares, 1)
    return x * jax.lax.rsqrt(squares)[..., None]
