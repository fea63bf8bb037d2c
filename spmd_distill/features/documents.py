"""Sums over the documents of packed rows, and features that are centred and scaled document by document."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from spmd_distill.collectives import pmax, psum


@dataclass(frozen=True, eq=False)
class Documents:
    """Which document of its row each token belongs to. Number 0 is padding, others are at most ``most``."""

    segments: Int[Array, "B Lx"]
    most: int

    def sum(self, values: Num[Array, "B Lx *rest"]) -> Num[Array, "B S *rest"]:
        """Over the tokens of each document: ``[B, most + 1, ...]``, by its number."""
        return jax.vmap(lambda x, i: jax.ops.segment_sum(x, i, self.most + 1))(values, self.segments)

    def max(self, values: Num[Array, "B Lx"]) -> Num[Array, "B S"]:
        """The largest value of each document, at least 0."""
        return jax.vmap(lambda x, i: jnp.zeros(self.most + 1, x.dtype).at[i].max(x))(values, self.segments)

    def at(self, values: Num[Array, "B S *rest"]) -> Num[Array, "B Lx *rest"]:
        """For each token, what `sum` and the like found of its document."""
        return jax.vmap(lambda x, i: x[i])(values, self.segments)


def standardised(x: Float[Array, "B L Dm"], documents: Documents, valid: Bool[Array, "B L"]) -> Float[Array, "B L Dm"]:
    """Of each document: its mean taken away, and scaled so that tokens have a mean squared length of 1.

    ``x`` has this shard's channels of all tokens; those that are not ``valid`` hold zeros, before and after. Where the
    tokens of a document do not differ, all of them become zeros. Gradients take the scale as a constant: it is for
    what does not change with the scale, and then for nothing but the range and the precision of float32.
    """
    kind = jnp.finfo(x.dtype)
    largest = documents.max(pmax(jnp.max(jnp.abs(jax.lax.stop_gradient(x)), -1), "model"))
    x = x / documents.at(jnp.maximum(largest, kind.tiny**0.5))[..., None]
    count = documents.sum(valid.astype(x.dtype))

    def mean_square(x: jax.Array) -> Any:
        squares = jnp.sum(jnp.square(jax.lax.stop_gradient(x)), -1)
        return psum(documents.sum(squares), "model") / jnp.maximum(count, 1)

    def centred(x: jax.Array) -> jax.Array:
        mean = documents.sum(x) / jnp.maximum(count, 1)[..., None]
        return jnp.where(valid[..., None], x - documents.at(mean), 0)

    # The first mean is rounded: of features that do not vary it leaves something, which the second takes away.
    raw, shift = mean_square(x), jax.lax.stop_gradient(x - centred(x))
    x = centred(x - shift)
    variance = mean_square(x)
    varies = variance > raw * kind.eps**2
    scale = jnp.where(varies, jax.lax.rsqrt(jnp.where(varies, variance, 1)), 0)
    return x * documents.at(scale)[..., None]
