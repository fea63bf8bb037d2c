"""Tokens compared with those before them in their document, a block of tokens at a time.

Two ways to share the work among the shards of ``model``: each takes all tokens for its own heads, or all heads for its
own tokens (``spread``). In the second one the tokens of every block are cut, not the row, because late tokens have
more before them than early ones.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spmd_distill.collectives import all_to_all, axis_size
from spmd_distill.features.base import Tokens
from spmd_distill.features.blocks import Blocks, block_length, over_parts


class Causal(Blocks):
    """Rows of tokens in blocks, each token with those up to itself.

    ``heads``: how many [B, L, L] there are of both models together, on all shards if ``spread``, else on this one.
    """

    def __init__(self, tokens: Tokens, heads: int, dtype: Any, *, spread: bool):
        self.tokens = tokens
        batch, length = tokens.segments.shape
        itemsize = jnp.promote_types(dtype, jnp.float32).itemsize
        heads = math.ceil(heads / axis_size("model")) if spread else heads
        super().__init__(length, block_length(batch, heads, length, itemsize), spread=spread)

    def cut(self, x: Array, fill: Any = 0) -> Array:
        """This shard's tokens ``[B, own, ...]`` of what it has of all, ``[B, L, ...]``."""
        return self.own(self.filled(x, fill))

    def exchange(self, x: Float[Array, "B L local C"]) -> Float[Array, "B Lown places C"]:
        """The same of what each shard has for its own heads: all shards' places side by side."""
        x = jnp.moveaxis(self.divided(self.filled(x)), 2, 1)
        x = x.reshape(x.shape[0], -1, *x.shape[4:])
        return all_to_all(x, "model", split=1, concat=2) if self.shards > 1 else x

    def total(
        self,
        compare: Callable[[Any, Any, Bool[Array, "B M N"]], Float[Array, "B M"]],
        queries: Any,
        keys: Any,
        window: Int[Array, ""] | None = None,
    ) -> Float[Array, ""]:
        """The sum over all valid tokens of ``compare(queries of a block, keys of N tokens, which it sees)``.

        ``queries`` and ``keys`` are pytrees, as `cut` makes them and of all tokens. A token sees itself and, valid or
        not, those before it in its document, at most ``window`` in all.
        """
        place = jnp.arange(self.length, dtype=jnp.int32)
        segments = self.tokens.segments
        rows = (
            queries,
            self.cut(segments, -1),  # which is no token's
            self.cut(self.tokens.valid, False),
            self.cut(jnp.broadcast_to(place, segments.shape)),
        )

        def until(end: int) -> Callable[[jax.Array], jax.Array]:
            behind, documents, before = jax.tree.map(lambda x: x[:, :end], (keys, segments, place[None]))

            def one(begin: jax.Array) -> jax.Array:
                asking, document, valid, at = jax.tree.map(lambda x: self.mine(x, begin), rows)
                distance = at[:, :, None] - before[:, None]
                seen = (distance >= 0) & (document[:, :, None] == documents[:, None])
                if window is not None:
                    seen &= distance < window
                return jnp.where(valid, compare(asking, behind, seen), 0)

            return one

        values = over_parts(until, self.count, self.block)
        return self.tokens.total(values, jnp.ones(values.shape, bool), shared=True)


def forward_kl(teacher: Float[Array, "... N"], student: Float[Array, "... N"]) -> Float[Array, "..."]:
    """KL(teacher || student) of two log-softmaxes over the last dimension, in a form whose every summand is >= 0."""
    p, q = jnp.exp(teacher), jnp.exp(student)
    return jnp.sum(p * (teacher - student) + (q - p), axis=-1)


def blank(x: Float[Array, "B L H C"], keep: Bool[Array, "B L"]) -> Float[Array, "B L H C"]:
    """Zeros for tokens that must not count: what they hold might overflow, and 0 times infinity is no gradient."""
    return jnp.where(keep[:, :, None, None], x, 0)
