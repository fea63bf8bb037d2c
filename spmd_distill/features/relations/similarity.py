"""Cosines between a token and those before it."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd_distill.features.base import AbstractHiddenLoss, Side, Tokens
from spmd_distill.features.relations.gram import TokenPairs, directions


@dataclass(frozen=True)
class TokenSimilarity(AbstractHiddenLoss):
    """Token i: the mean over the valid tokens j < i of its document of ``(cos(s_i, s_j) - cos(t_i, t_j))^2``.

    Two tokens that the teacher holds similar are to be similar in the student, whatever directions it uses: widths
    need not be equal, and nothing is projected. From similarity-preserving distillation (Tung and Mori 2019,
    arXiv:1907.09682, eq. 4) come the matching of matrices of similarities and the squared difference. Theirs are
    between the images of a batch, with rows of the Gram matrix scaled to length 1; here they are between tokens of a
    document, and cosines, because such a row would hold what comes after the token.

    The first valid token of a document costs nothing, and a token without a direction has cosine 0 with all others.
    """

    at: str = "block_output"
    """The tap point, of hidden states."""

    def __call__(
        self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """See the base class."""
        s, t = student.taps[self.at], teacher.taps[self.at]
        pairs = TokenPairs(tokens, s.dtype)
        s, t = (directions(pairs.features(tokens.by_width(x))) for x in (s, t))

        def compare(cosines, _, related, itself):
            before = related & ~itself
            squares = jnp.where(before, jnp.square(cosines[0] - cosines[1]), 0)
            return jnp.sum(squares, -1) / jnp.maximum(jnp.sum(before, -1), 1)

        return tokens.total(pairs.map(compare, [(s, s), (t, t)]), pairs.own_valid, shared=True)
