"""Linear centred kernel alignment (CKA): how far two sets of features agree, up to rotation, scale and width.

Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited", arXiv:1905.00414, equations 2 and 3
with linear kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from spmd_distill.collectives import reduce_from
from spmd_distill.features.base import AbstractFeatureLoss, Side, Tokens, wide
from spmd_distill.features.documents import standardised
from spmd_distill.features.gram import TokenPairs, relation_tap


@dataclass(frozen=True)
class CenteredKernelAlignment(AbstractFeatureLoss):
    """1 - CKA of a document's tokens in both models, times its valid tokens.

    So the objective's mean over valid tokens is a mean over documents, weighted by their lengths. CKA is that of
    `linear_cka`, with features centred over the document's valid tokens; widths need not be equal, and neither a
    rotation of the student's channels nor a factor changes anything. A document of one valid token, or whose tokens do
    not vary in one of the models, costs nothing and has no gradient.

    Of n tokens at random in D channels, CKA comes close to 1 where n is below D, however little they have in common:
    documents should be longer than the models are wide, or the loss says little.
    """

    unit: ClassVar[str] = "document"

    at: str = "block_output"
    """The tap point, of hidden states."""

    def __post_init__(self):
        relation_tap(self)

    @property
    def taps(self) -> tuple[str, ...]:
        """The one it is at."""
        return (self.at,)

    def __call__(
        self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """See the base class. Sums over pairs of tokens."""
        s, t = student.taps[self.at], teacher.taps[self.at]
        pairs = TokenPairs(tokens, s.dtype)
        s, t = (standardised(pairs.features(tokens.by_width(x)), pairs.documents, pairs.valid) for x in (s, t))

        def compare(products, _, related, itself):
            weights = jnp.where(itself, 1.0, 2.0).astype(s.dtype) * related  # (i, j) stands for (j, i) too
            k, l = products  # noqa: E741 (the paper's letters)
            return jnp.stack([jnp.sum(weights * x, -1) for x in (k * l, k * k, l * l)], -1)

        sums: Any = reduce_from(pairs.own_documents.sum(pairs.map(compare, [(s, s), (t, t)])), "model")
        count = pairs.documents.sum(pairs.valid.astype(sums.dtype))
        xy, xx, yy = jnp.moveaxis(sums, -1, 0)
        return tokens.total(count * (1 - alignment(xy, xx, yy)), (xx > 0) & (yy > 0), shared=False)


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
