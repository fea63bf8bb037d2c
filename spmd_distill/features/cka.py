"""Linear centred kernel alignment (CKA): how far two sets of features agree, up to rotation, scale and width.

Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited", arXiv:1905.00414, equations 2 and 3
with linear kernels.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from spmd_distill.features.base import wide


def linear_cka(x: Float[Array, "N Dx"], y: Float[Array, "N Dy"]) -> Float[Array, ""]:
    """CKA of the features that two models have of the same N tokens: from 0, nothing in common, to 1, all.

    ``HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))`` with the Gram matrices ``K = X X^T`` and ``L = Y Y^T`` of features that
    are centred here. 0 where one of the two does not vary. Of the two equal ways, over pairs of tokens (N x N) or pairs
    of channels (Dx x Dy, and so on), it takes the smaller. In float32, or float64 where an input is.
    """
    x, y = _standardised(wide(x)), _standardised(wide(y))
    if x.shape[0] <= max(x.shape[1], y.shape[1]):
        k, l = _dot(x, x.T), _dot(y, y.T)  # noqa: E741 (the paper's letters)
        xy, xx, yy = jnp.sum(k * l), jnp.sum(k * k), jnp.sum(l * l)
    else:
        xy, xx, yy = (jnp.sum(jnp.square(_dot(a.T, b))) for a, b in ((x, y), (x, x), (y, y)))
    return alignment(xy, xx, yy)


def gram(x: Float[Array, "N D"]) -> Float[Array, "N N"]:
    """The Gram matrix of features, centred and scaled: its diagonal has the mean 1. Zeros where they do not vary."""
    x = _standardised(wide(x))
    return _dot(x, x.T)


def alignment(xy: Float[Array, "*S"], xx: Float[Array, "*S"], yy: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """CKA from the three sums over pairs, of K L, K K and L L; 0, without a gradient, where K or L is nothing."""
    some = (xx > 0) & (yy > 0)
    xx, yy = jnp.where(some, xx, 1), jnp.where(some, yy, 1)
    return jnp.where(some, xy, 0) * lax.rsqrt(xx) * lax.rsqrt(yy)


def _standardised(x: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """Centred, and of mean square norm 1, so that fourth powers stay in range: CKA does not see the scale."""
    largest = jnp.max(jnp.abs(x), initial=0)
    x = x / jnp.where(largest > 0, largest, 1)
    raw = jnp.mean(jnp.square(x))
    for _ in range(2):  # the first mean is rounded: what it leaves of features that do not vary, the second takes
        x = x - jnp.mean(x, 0)
    variance = jnp.mean(jnp.square(x))
    varies = variance > raw * jnp.square(jnp.finfo(x.dtype).eps)
    return jnp.where(varies, x, 0) * lax.rsqrt(jnp.where(varies, variance * x.shape[1], 1))


def _dot(a: Float[Array, "A K"], b: Float[Array, "K B"]) -> Float[Array, "A B"]:
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST)
