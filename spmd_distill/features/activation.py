"""Where in a document a layer is active: maps over tokens, compared whatever the widths are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spmd_distill.collectives import collect_from
from spmd_distill.errors import UserError
from spmd_distill.features.base import AbstractFeatureLoss, Side, Tokens, wide
from spmd_distill.features.hidden import HIDDEN

EPSILON = 1e-12
"""Length below which a map has no direction: it is divided by ``sqrt(|q|^2 + EPSILON^2)``."""


@dataclass(frozen=True)
class ActivationMaps(AbstractFeatureLoss):
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
        if not (math.isfinite(self.power) and self.power >= 1):
            raise UserError(f"ActivationMaps: power is {self.power}; expected a number from 1, such as 2.")
        if self.at not in HIDDEN:
            raise UserError(f"ActivationMaps: at is {self.at!r}; expected one of {', '.join(HIDDEN)}.")

    @property
    def taps(self) -> tuple[str, ...]:
        """The one it is at."""
        return (self.at,)

    def __call__(
        self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """See the base class. Where hidden states are cut along the sequence, one number a token is put together."""
        s, t = (self._map(side.taps[self.at], tokens) for side in (student, teacher))
        counted = _of_document(tokens.valid.astype(s.dtype), tokens.segments)
        return tokens.total(counted * jnp.square(s - t), tokens.valid, shared=False)

    def _map(self, x: Float[Array, "B Ls D"], tokens: Tokens) -> Float[Array, "B L"]:
        """Zero where a token does not count; of length 1 over the others of a document."""

        @jax.checkpoint  # nothing of [B, Ls, D] is kept in float32
        def energy(x: jax.Array) -> jax.Array:
            whole = int(self.power) if self.power == int(self.power) else self.power
            x = jnp.where(tokens.here(tokens.valid)[..., None], wide(x), 0)
            return jnp.mean(jnp.abs(x) ** whole, -1)

        q: Any = energy(x)
        if tokens.sequence_sharded:  # every shard then does the same with all tokens
            q = collect_from(q, "model", 1)
        return q * jax.lax.rsqrt(_of_document(jnp.square(q), tokens.segments) + EPSILON**2)


def _of_document(x: Float[Array, "B L"], segments: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """For every token, the sum over the tokens of its document."""
    sums = jax.vmap(partial(jax.ops.segment_sum, num_segments=x.shape[1] + 1))(x, segments)
    return jnp.take_along_axis(sums, segments, axis=1)
