"""Loss scales: a factor on the loss that keeps the gradients of 16-bit computations away from 0.

Micikevicius et al. 2017, arXiv:1710.03740. The factor is there from the head's weights on, so that also what the head
keeps in the compute type is scaled, and gone before anything looks at a gradient.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class ScaleState:
    """A dynamic loss scale between two steps."""

    scale: Any
    """A float32 scalar."""
    good: Any
    """Finite steps since the scale last changed: an int32 scalar."""


@dataclass(frozen=True)
class LossScale:
    """A constant factor (``window`` None), or one that doubles after ``window`` good steps and halves after a bad one.

    Powers of two cost no precision.
    """

    first: float = 2.0**15
    window: int | None = 1000

    def init(self) -> Any:
        """What a train state holds of it: None if it is constant."""
        return None if self.window is None else ScaleState(jnp.float32(self.first), jnp.int32(0))

    def factor(self, state: Any) -> jax.Array:
        """The factor of the next step."""
        return jnp.float32(self.first) if state is None else state.scale

    def after(self, state: Any, finite: jax.Array) -> Any:
        """The state after a step with finite gradients, or without."""
        if state is None:
            return None
        full = finite & (state.good + 1 >= self.window)
        scale = jnp.where(finite, jnp.where(full, state.scale * 2, state.scale), state.scale / 2)
        scale = jnp.clip(scale, 2.0**-24, 2.0**60)
        return ScaleState(scale, jnp.where(full | ~finite, 0, state.good + 1))
