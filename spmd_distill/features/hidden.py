"""The distance between a student's hidden state and the teacher's, token by token."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from spmd_distill.collectives import copy_to
from spmd_distill.errors import UserError
from spmd_distill.features.base import AbstractHiddenLoss, Side, Tokens, above_zero, one_of, wide
from spmd_distill.features.distances import DISTANCES, settings_of
from spmd_distill.features.projection import INITS, PROJECTIONS, check_same_width, declare_projection, projected


@dataclass(frozen=True)
class HiddenStates(AbstractHiddenLoss):
    """``distance(h_s W, h_t)`` of every token, W a learned ``[D_s, D_t]`` that works on the channels alone.

    The regression of FitNets (Romero et al. 2014, arXiv:1412.6550, eq. 3) on the hidden states of a transformer
    (TinyBERT, Jiao et al. 2019, arXiv:1909.10351, eq. 8). Without W the two rows are compared as they are, or, with
    ``pool``, their averages over windows of channels.
    """

    distance: str = "mse"
    """Of two rows, by its name in `DISTANCES`: mse, normalized_mse, cosine, huber."""
    at: str = "block_output"
    """The tap point: one of `HIDDEN`."""
    projection: str = "auto"
    """``per_layer``: a W for each pair of layers; ``shared``: one for all of them; ``none``; ``auto``: ``per_layer``
    where the widths differ and nothing is pooled."""
    init: str = "orthogonal"
    """What W is born as, by its name in `INITS`. ``orthogonal``: orthonormal rows, so that lengths and angles are kept
    (columns, where the student is the wider one); ``normal``: of variance 1 / D_s; ``identity``: ones on the
    diagonal."""
    pool: int | None = None
    """Compare averages over this many windows of channels, of any two widths (those of
    ``torch.nn.AdaptiveAvgPool1d``)."""
    delta: float = 1.0
    """Where ``huber`` turns from a square into a line."""

    def __post_init__(self):
        super().__post_init__()
        for setting, names in (("distance", DISTANCES), ("projection", PROJECTIONS), ("init", INITS)):
            one_of(self, setting, names)
        if self.pool is not None and self.pool < 1:
            raise UserError(f"HiddenStates: pool is {self.pool}; expected a number of channels, at least 1.")
        if self.pool is not None and self.projection in ("per_layer", "shared"):
            raise UserError(
                f"HiddenStates: both pool: {self.pool} and projection: {self.projection} are given, and each makes the "
                f"widths equal; expected one of them: leave the other out."
            )
        above_zero(self, "delta")
        if self.delta != 1.0 and "delta" not in settings_of(self.distance):
            raise UserError(
                f"HiddenStates: delta is {self.delta}, but distance {self.distance} has none; "
                f"leave it out, or take distance huber."
            )

    def check(self, student: Any, teacher: Any) -> None:
        """See the base class."""
        if self.pool is not None and self.pool > min(student.width, teacher.width):
            raise UserError(
                f"HiddenStates: pool is {self.pool}, more than there are channels: the student has {student.width}, "
                f"the teacher {teacher.width}; take at most {min(student.width, teacher.width)}."
            )
        if self.pool is None and self.projection == "none":
            check_same_width(self, student, teacher, ", or pool, a number of channels to average both to")

    def declare(self, rngs: nnx.Rngs, student: Any, teacher: Any, pairs: int) -> dict[str, nnx.Param]:
        """``projection``, ``[D_s, D_t]``, for each pair or for all."""
        automatic = self.projection == "auto" and self.pool is None and student.width != teacher.width
        if not automatic and self.projection not in ("per_layer", "shared"):
            return {}
        return declare_projection(rngs, self.init, student, teacher, None if self.projection == "shared" else pairs)

    def __call__(
        self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """See the base class. Shards of ``model`` share the matmul; without one, each looks at what it has."""
        s, t = student.taps[self.at], teacher.taps[self.at]
        w: Any = params.get("projection")
        if w is None:
            valid, shared = tokens.here(tokens.valid), tokens.sequence_sharded
        else:
            s, t, w = tokens.spread(s), tokens.spread(t), copy_to(w, "model")
            valid, shared = tokens.own(tokens.valid), True
        # the backward pass begins with the taps again: nothing in float32 is kept until then
        return tokens.total(jax.checkpoint(self._distances)(s, t, valid, w), valid, shared=shared)

    def _distances(
        self, s: Float[Array, "B M Ds"], t: Float[Array, "B M Dt"], valid: Bool[Array, "B M"], w: jax.Array | None
    ) -> Float[Array, "B M"]:
        # masked before and not only behind: a number that overflows has a gradient that is none, even times 0
        s, t = (jnp.where(valid[..., None], x, 0) for x in (s, t))
        if w is not None:
            s = projected(s, w)
        if self.pool is not None:
            s, t = pooled(s, self.pool), pooled(t, self.pool)
        between = partial(DISTANCES[self.distance], **{k: getattr(self, k) for k in settings_of(self.distance)})
        return between(wide(s), wide(t))


def pooled(x: Float[Array, "*rows D"], channels: int) -> Float[Array, "*rows P"]:
    """Averages over ``channels`` windows: window i of D channels is those from ``floor(i D / P)`` to, and without,
    ``ceil((i + 1) D / P)``.
    """
    width, dtype = x.shape[-1], wide(x).dtype
    if width % channels == 0:
        return jnp.mean(x.reshape(*x.shape[:-1], channels, -1), -1, dtype=dtype)
    i, channel = np.arange(channels), np.arange(width)[:, None]
    members = (channel >= i * width // channels) & (channel < -(-(i + 1) * width // channels))
    # ones are exact in every type, so that the sums are those of float32
    sums = jnp.einsum("...d,dp->...p", x, jnp.asarray(members, x.dtype), preferred_element_type=dtype)
    return sums / jnp.asarray(members.sum(0), dtype)
