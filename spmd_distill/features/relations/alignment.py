"""Centred kernel alignment (CKA) of the tokens of a document (Kornblith et al. 2019, arXiv:1905.00414)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd_distill.collectives import reduce_from
from spmd_distill.features.base import AbstractHiddenLoss, Side, Tokens
from spmd_distill.features.cka import alignment
from spmd_distill.features.documents import standardised
from spmd_distill.features.relations.gram import TokenPairs


@dataclass(frozen=True)
class CenteredKernelAlignment(AbstractHiddenLoss):
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
