"""Rotary position embeddings and the ways they are stretched beyond the length a model was first trained on."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spmd_distill.errors import UserError

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """Frequencies of rotary positions (Su et al. 2021, arXiv:2104.09864), in the terms of Hugging Face configs.

    ``linear`` divides all frequencies by ``factor`` (Chen et al. 2023, arXiv:2306.15595); ``llama3`` divides those
    whose wavelength is long compared with ``original_length``, ``yarn`` by its own ramp and with a factor on the
    attention logits (Peng et al. 2023, arXiv:2309.00071); ``longrope`` has a factor for every frequency, and a second
    set of them for rows that reach beyond ``original_length`` (Ding et al. 2024, arXiv:2402.13753).

    Raises `UserError` for an unknown kind and for numbers that cannot be.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    """Positions of the first training; the kinds but ``default`` and ``linear`` need it."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """What cosine and sine are multiplied with; None is what the kind's paper says."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    fraction: float = 1.0
    """Part of each head's channels that turns at all; the rest carries no position."""

    def __post_init__(self):
        """Check the numbers."""
        if self.kind not in KINDS:
            raise UserError(
                f"Rotary positions: kind {self.kind!r} is not supported; expected one of {', '.join(KINDS)}."
            )
        if not (self.theta > 0 and self.factor > 0 and 0 < self.fraction <= 1):
            raise UserError(
                f"Rotary positions: base {self.theta}, factor {self.factor} and fraction {self.fraction} must be "
                f"positive, the last at most 1."
            )
        if self.kind in ("llama3", "yarn", "longrope") and self.original_length < 1:
            raise UserError(
                f"Rotary positions of kind {self.kind!r} need the length of the first training "
                f"(original_max_position_embeddings), found {self.original_length}."
            )
        if self.kind == "llama3" and not self.low_frequency_factor < self.high_frequency_factor:
            raise UserError(
                f"Rotary positions: low_freq_factor {self.low_frequency_factor} must be below high_freq_factor "
                f"{self.high_frequency_factor}."
            )

    def turning(self, head_dim: int) -> int:
        """How many of a head's channels turn: an even number."""
        return int(head_dim * self.fraction) // 2 * 2

    def frequencies(self, head_dim: int, *, long: bool = False) -> np.ndarray:
        """Radians a position, float64 ``[turning / 2]``; with ``long``, those of a row beyond `original_length`."""
        turning = self.turning(head_dim)
        plain = self.theta ** (-np.arange(0, turning, 2, dtype=np.float64) / turning)
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            turns = self.original_length * plain / (2 * math.pi)  # over the first training's length
            low, high = self.low_frequency_factor, self.high_frequency_factor
            kept = np.clip((turns - low) / (high - low), 0, 1)
            return kept * plain + (1 - kept) * plain / self.factor
        if self.kind == "yarn":
            low, high = (self._channel(turns, turning) for turns in (self.beta_fast, self.beta_slow))
            low, high = max(math.floor(low), 0), min(math.ceil(high), turning - 1)
            divided = np.clip((np.arange(turning // 2) - low) / max(high - low, 1e-3), 0, 1)
            return plain * (1 - divided) + plain / self.factor * divided
        if self.kind == "longrope":
            factors = np.asarray(self.long_factors if long else self.short_factors, np.float64)
            if factors.shape != plain.shape:
                raise UserError(
                    f"Rotary positions: {len(factors)} {'long' if long else 'short'} factors for {len(plain)} "
                    f"frequencies; expected as many."
                )
            return plain / factors
        return plain

    def _channel(self, turns: float, turning: int) -> float:
        """The (fractional) number of the frequency that turns so often over the first training's length."""
        return turning * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

    @property
    def scale(self) -> float:
        """What cosine and sine are multiplied with."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1
        if self.kind == "longrope":
            return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return 1.0


PLAIN = Rope()
"""As in the first Llama."""

Rotation = tuple[Float[Array, "B L 1 half"], Float[Array, "B L 1 half"]]
"""Cosine and sine for every token and turning pair of channels."""


def rotation_of(positions: Int[Array, "B L"], head_dim: int, rope: Rope, dtype: Any) -> Rotation:
    """Cosine and sine at these positions, float32 or wider.

    Rows whose positions reach beyond `Rope.original_length` turn by the long factors of ``longrope``, so that a row
    reads the same whatever the other rows of its batch are.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    frequency: Any = jnp.asarray(rope.frequencies(head_dim), wide)
    if rope.kind == "longrope":
        beyond = jnp.max(positions, axis=1) >= rope.original_length
        longer = jnp.asarray(rope.frequencies(head_dim, long=True), wide)
        frequency = jnp.where(beyond[:, None, None], longer, frequency)
    angle = positions.astype(wide)[..., None] * frequency
    return (jnp.cos(angle) * rope.scale)[:, :, None], (jnp.sin(angle) * rope.scale)[:, :, None]


def rotate(x: Float[Array, "B L H C"], rotation: Rotation) -> Float[Array, "B L H C"]:
    """Rotate the two halves of each head's turning channels against each other (Hugging Face's layout)."""
    cos, sin = rotation
    half = cos.shape[-1]
    wide = x.astype(cos.dtype)
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


def rope_from_huggingface(config: Any, layer_type: str | None = None, where: str = "config.json") -> Rope:
    """Read ``rope_theta`` and ``rope_scaling``, or what transformers 5 writes instead, ``rope_parameters``.

    With ``layer_type``, of the layers of that type where a config tells them apart. Raises `UserError` for kinds that
    do not exist here.
    """
    written = config.get("rope_parameters") or {}
    if layer_type in written:
        written = written[layer_type] or {}
    rope = {**(config.get("rope_scaling") or {}), **written}
    kind = rope.get("rope_type", rope.get("type", "default")) or "default"
    kind = "longrope" if kind == "su" else kind
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    longest = config.get("max_position_embeddings") or 2048
    original = int(original or longest)
    factor = rope.get("factor")
    if kind == "longrope" and config.get("original_max_position_embeddings"):
        factor = longest / original
    if kind == "yarn" and any(key in rope for key in ("mscale", "mscale_all_dim")):
        raise UserError(f"{where}: rotary positions with mscale are not supported; expected yarn without it.")
    try:
        return Rope(
            theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            kind=kind,
            factor=float(factor or 1.0),
            original_length=original if kind in ("llama3", "yarn", "longrope") else 0,
            low_frequency_factor=float(rope.get("low_freq_factor", 1.0)),
            high_frequency_factor=float(rope.get("high_freq_factor", 4.0)),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            attention_factor=rope.get("attention_factor"),
            short_factors=tuple(rope.get("short_factor") or ()),
            long_factors=tuple(rope.get("long_factor") or ()),
            fraction=float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0),
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: rotary positions {rope} cannot be read ({error}).") from error


def rope_to_huggingface(rope: Rope) -> dict[str, Any] | None:
    """The ``rope_scaling`` of a ``config.json``; None for plain frequencies."""
    if rope.kind == "default":
        return None
    found: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "longrope":
        found["factor"] = rope.factor
    else:
        found["type"] = rope.kind  # the key that releases of Phi-3's time look for
    if rope.original_length and rope.kind != "longrope":  # that one's stands beside max_position_embeddings
        found["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        found |= {"low_freq_factor": rope.low_frequency_factor, "high_freq_factor": rope.high_frequency_factor}
    if rope.kind == "yarn":
        found |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if rope.kind == "longrope":
        found |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
    if rope.attention_factor is not None:
        found["attention_factor"] = rope.attention_factor
    return found
