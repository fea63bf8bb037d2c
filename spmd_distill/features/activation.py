"""Where in a document a layer is active: maps over tokens, compared whatever the widths are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from spmd_distill.collectives import collect_from
from spmd_distill.errors import UserError
from spmd_distill.features.base import AbstractHiddenLoss, Side, Tokens, wide
from spmd_distill.features.documents import Documents

EPSILON = 1e-12
"""What keeps the map of zeros alone at 0: it is divided by ``sqrt(|q|^2 + EPSILON^2)``, with |h| at most 1."""


@dataclass(frozen=True)
class ActivationMaps(AbstractHiddenLoss):
    """``|q_s / |q_s| - q_t / |q_t||^2`` of a document, q its tokens' mean over the channels of ``|h|^power``.

    Activation-based attention transfer (Zagoruyko and Komodakis 2017, arXiv:1612.03928, eq. 1 and 2, with a square in
    place of the norm) with the tokens of a document for the places of an image. Only valid tokens are in a map. A
    document's loss counts once for each of them, so that the objective is the mean over documents by their length.
    """

    unit: ClassVar[str] = "document"

    power: float = 2.0
    """What magnitudes are raised to: the higher, the more the few large channels decide."""
    at: str = "block_output"
    """The tap point: one of `HIDDEN`."""

    def __post_init__(self):
        super().__post_init__()
        if not (math.isfinite(self.power) and self.power >= 1):
            raise UserError(f"ActivationMaps: power is {self.power}; expected a number from 1, such as 2.")

    def __call__(
        self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """See the base class. Where hidden states are cut along the sequence, two numbers a token are put together."""
        documents = Documents(tokens.segments, tokens.segments.shape[1])
        s, t = (self._map(side.taps[self.at], tokens, documents) for side in (student, teacher))
        counted = documents.at(documents.sum(tokens.valid.astype(s.dtype)))
        return tokens.total(counted * jnp.square(s - t), tokens.valid, shared=False)

    def _map(self, x: Float[Array, "B Ls D"], tokens: Tokens, documents: Documents) -> Float[Array, "B L"]:
        """Zero where a token does not count; of length 1 over the others of a document.

        Powers of large numbers overflow. A token's are taken of ``h / max |h|``, and put back relative to the largest
        of the document: a factor that leaves the map, and so has no gradient.
        """
        power = int(self.power) if self.power == int(self.power) else self.power
        found: Any = jax.checkpoint(partial(_magnitudes, power=power))(x, tokens.here(tokens.valid))
        if tokens.sequence_sharded:  # every shard then does the same with all tokens
            found = [collect_from(v, "model", 1) for v in found]
        largest, mean = jax.lax.stop_gradient(found[0]), found[1]
        q = mean * (largest / _above_zero(documents.at(documents.max(largest)))) ** power
        return q * jax.lax.rsqrt(documents.at(documents.sum(jnp.square(q))) + EPSILON**2)


def _magnitudes(
    x: Float[Array, "B M D"], valid: Bool[Array, "B M"], *, power: float
) -> tuple[Float[Array, "B M"], Float[Array, "B M"]]:
    """A token's largest |h|, and the mean of the powers of all over it; 0 where a token does not count.

    Recomputed in the backward pass, so that nothing of [B, M, D] is kept in float32.
    """
    h = jnp.abs(jnp.where(valid[..., None], wide(x), 0))
    largest = jax.lax.stop_gradient(jnp.max(h, -1))
    return largest, jnp.mean((h / _above_zero(largest)[..., None]) ** power, -1)


def _above_zero(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, 1)
