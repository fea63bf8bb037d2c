"""Relational knowledge distillation between tokens: distances and angles (Park et al. 2019, arXiv:1904.05068)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from spmd_distill.collectives import axis_index, copy_to, reduce_from, scatter_to
from spmd_distill.errors import UserError
from spmd_distill.features.base import AbstractHiddenLoss, Side, Tokens, above_zero, wide
from spmd_distill.features.blocks import Blocks, block_length, over_blocks
from spmd_distill.features.documents import Documents, standardised
from spmd_distill.features.relations.gram import TokenPairs, squared_lengths

ROUNDED = 32
"""Squared distances of two tokens up to this many units of rounding of their squared lengths are 0."""


@dataclass(frozen=True)
class RelationalDistance(AbstractHiddenLoss):
    """RKD-D (eq. 4 to 6): of a document, the mean over its pairs of tokens of ``huber(psi_s - psi_t)``.

    ``psi(i, j) = |x_i - x_j| / mu``, where mu is the mean distance of the document's pairs, each model its own; the
    gradient goes through the student's mu too. Times the document's valid tokens, so that the objective's mean over
    valid tokens is a mean over documents, weighted by their lengths. The paper's pairs are those of a batch.

    Widths need not be equal. Documents of one valid token cost nothing. Where all tokens of a document are alike its
    distances are 0, without a gradient, and so is the distance of two tokens that are alike.
    """

    unit: ClassVar[str] = "document"

    at: str = "block_output"
    """The tap point, of hidden states."""
    delta: float = 1.0
    """Where the Huber loss turns from ``e^2 / 2`` into a line."""

    def __post_init__(self):
        super().__post_init__()
        above_zero(self, "delta")

    def __call__(
        self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """See the base class. Two passes over the pairs: mean distances first."""
        s, t = student.taps[self.at], teacher.taps[self.at]
        pairs = TokenPairs(tokens, s.dtype)
        s, t = (standardised(pairs.features(tokens.by_width(x)), pairs.documents, pairs.valid) for x in (s, t))
        squares = [squared_lengths(x) for x in (s, t)]
        own_squares = [pairs.own(x) for x in squares]

        def distances(products: Any, own_squares: Any, between: Bool[Array, "B M N"]) -> list[jax.Array]:
            return [
                _distances(product, own, all_[:, : between.shape[-1]], between)
                for product, own, all_ in zip(products, own_squares, squares, strict=True)
            ]

        def lengths(products, own_squares, related, itself):
            return jnp.stack([jnp.sum(d, -1) for d in distances(products, own_squares, related & ~itself)], -1)

        features = [(s, s), (t, t)]
        sums = pairs.own_documents.sum(pairs.map(lengths, features, own_squares))
        count = pairs.documents.sum(pairs.valid.astype(sums.dtype))
        total: Any = reduce_from(sums, "model")
        mean = total / jnp.maximum(count * (count - 1) / 2, 1)[..., None]
        some = mean > 0
        inverse: Any = copy_to(jnp.where(some, 1 / jnp.where(some, mean, 1), 0), "model")

        def compare(products, mine, related, itself):
            own_squares, inverse = mine
            psi = [
                d * inverse[:, :, n, None] for n, d in enumerate(distances(products, own_squares, related & ~itself))
            ]
            return jnp.sum(optax.losses.huber_loss(psi[0], psi[1], delta=self.delta), -1)

        values = pairs.map(compare, features, (own_squares, pairs.own_documents.at(inverse)))
        # of n tokens: n times the mean over n (n - 1) / 2 pairs
        weight = 2 / jnp.maximum(pairs.own_documents.at(count) - 1, 1)
        return tokens.total(values * weight, pairs.own_valid, shared=True)


def _distances(
    products: Float[Array, "B M N"],
    own: Float[Array, "B M"],
    squares: Float[Array, "B N"],
    between: Bool[Array, "B M N"],
) -> Float[Array, "B M N"]:
    """Distances from inner products and squared lengths; 0, without a gradient, where they are lost in rounding."""
    both = own[..., None] + squares[:, None]
    found = both - 2 * products
    some = between & (found > ROUNDED * jnp.finfo(found.dtype).eps * both)
    return jnp.where(some, jnp.sqrt(jnp.where(some, found, 1)), 0)


@dataclass(frozen=True)
class RelationalAngle(AbstractHiddenLoss):
    """RKD-A (eq. 7 and 8): of a document, the mean over triples of tokens of ``huber(psi_s - psi_t)``.

    ``psi(i, j, k)`` is the cosine of the angle at j: of ``x_i - x_j`` and ``x_k - x_j``. All triples of a document
    would be the third power of its length, so i and k are tokens at most ``neighbours`` places before or behind j: all
    triples of documents up to one token longer than that. Times the document's valid tokens, as `RelationalDistance`.

    Widths need not be equal. Documents of fewer than three valid tokens cost nothing, and where two tokens of a triple
    are alike the cosine is 0, without a gradient.
    """

    unit: ClassVar[str] = "document"

    at: str = "block_output"
    """The tap point, of hidden states."""
    neighbours: int = 8
    """How many places a triple's other tokens are away from the one at the angle, at most."""
    delta: float = 1.0
    """Where the Huber loss turns from ``e^2 / 2`` into a line."""

    def __post_init__(self):
        super().__post_init__()
        above_zero(self, "delta")
        if self.neighbours < 1:
            raise UserError(
                f"RelationalAngle: neighbours is {self.neighbours}; expected a number of tokens, at least 1."
            )

    def __call__(
        self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """See the base class. Differences are of this shard's channels, their products a reduce-scatter completes."""
        batch, length = tokens.segments.shape
        valid, documents = tokens.valid & (tokens.segments > 0), Documents(tokens.segments, length)

        def features(x: Array) -> Array:
            x = wide(tokens.by_width(x)[:, :length])
            return standardised(jnp.where(valid[..., None], x, 0), documents, valid)

        s, t = (features(side.taps[self.at]) for side in (student, teacher))
        reach = max(min(self.neighbours, length - 1), 1)
        span = 2 * reach + 1
        floats = 2 * span * (max(s.shape[2], t.shape[2]) + span)  # what a token takes
        blocks = Blocks(length, block_length(batch, math.ceil(floats / length), length, s.dtype.itemsize))
        around = jnp.arange(blocks.block)[:, None] + jnp.arange(span)

        def neighbours(x: Array) -> Callable[[jax.Array], Array]:
            """Of ``[B, L, ...]``, the function of a block's begin that gives ``[B, M, span, ...]``."""
            x = jnp.pad(blocks.filled(x), [(0, 0), (reach, reach)] + [(0, 0)] * (x.ndim - 2))
            return lambda begin: jax.lax.dynamic_slice_in_dim(x, begin, blocks.block + span - 1, 1)[:, around]

        all_s, all_t, all_valid, all_segments = (neighbours(x) for x in (s, t, valid, tokens.segments))

        def rows(begin: jax.Array) -> jax.Array:
            valid, segments = all_valid(begin), all_segments(begin)
            linked = valid & valid[:, :, reach, None] & (segments == segments[:, :, reach, None])
            linked &= jnp.arange(span) != reach  # which is the one at the angle

            def cosines(x: jax.Array) -> jax.Array:
                x = jnp.where(linked[..., None], x - x[:, :, reach, None], 0)
                partial = jnp.einsum("bmic,bmkc->bmik", x, x, precision=jax.lax.Precision.HIGHEST)
                return _cosines(scatter_to(partial, "model", 1))

            ours = jax.lax.dynamic_slice_in_dim(linked, axis_index("model") * blocks.rows, blocks.rows, 1)
            triples = ours[..., None] & ours[..., None, :] & ~jnp.eye(span, dtype=bool)
            costs = optax.losses.huber_loss(cosines(all_s(begin)), cosines(all_t(begin)), delta=self.delta)
            costs = jnp.sum(jnp.where(triples, costs, 0), (-2, -1))
            return jnp.stack([costs, jnp.sum(triples, (-2, -1)).astype(costs.dtype)], -1)

        found = over_blocks(rows, blocks.count * blocks.block, blocks.block)
        own = Documents(blocks.own(blocks.filled(tokens.segments)), length)
        sums: Any = reduce_from(own.sum(found), "model")
        count = documents.sum(valid.astype(sums.dtype))
        return tokens.total(count * sums[..., 0] / jnp.maximum(sums[..., 1], 1), count > 0, shared=False)


def _cosines(products: Float[Array, "B M W W"]) -> Float[Array, "B M W W"]:
    """Of vectors, from their inner products; 0, without a gradient, where one is nothing."""
    squares = jnp.diagonal(products, axis1=-2, axis2=-1)
    some = squares > jnp.finfo(squares.dtype).tiny
    inverse = jnp.where(some, jax.lax.rsqrt(jnp.where(some, squares, 1)), 0)
    return products * inverse[..., None] * inverse[..., None, :]
