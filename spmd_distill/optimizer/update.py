"""From gradients to the next parameters, inside the jitted step: an update that must not happen leaves no trace.

One mechanism serves whoever has to skip a step: conditions are gathered in one scalar ``ok``, and `keep_unless` then
gives back either all that is new or all that was there, bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")

OF_THE_TEACHER = ("ce_teacher", "entropy_teacher")
"""Metrics that the teacher's log-probabilities on valid tokens make alone: finite exactly where these are."""


@dataclass(frozen=True)
class Skip:
    """When an optimizer step leaves parameters and optimizer state as they are. The step counts all the same."""

    nonfinite: bool = True
    """The loss, or the norm of the gradient, is NaN or infinite."""
    teacher: bool = True
    """The teacher's log-probabilities on valid tokens are not finite."""
    spike: bool = False
    """The loss is above the step's fourth argument, a float32 scalar."""

    def ok(self, sums: Mapping[str, jax.Array], count: jax.Array, norm: jax.Array, limit: Any) -> jax.Array:
        """A boolean scalar: may the update happen?

        Args:
            sums: metric sums over the valid tokens, by name.
            count: valid tokens.
            norm: global norm of the gradient.
            limit: the largest loss, a mean over valid tokens; looked at only with `spike`.
        """
        ok = jnp.bool_(True)
        if self.nonfinite:
            ok &= all_finite(sums["loss"], norm)
        if self.teacher:
            ok &= all_finite(*(sums[name] for name in OF_THE_TEACHER if name in sums))
        if self.spike:
            ok &= sums["loss"] <= limit * jnp.maximum(count, 1)
        return ok


SKIP = Skip()
"""What is not finite is never learnt."""


def all_finite(*values: jax.Array) -> jax.Array:
    """A boolean scalar: no number of these arrays is NaN or infinite."""
    return jnp.stack([jnp.isfinite(x).all() for x in values]).all() if values else jnp.bool_(True)


def keep_unless(ok: jax.Array, new: T, old: T) -> T:
    """All arrays of ``new`` where ``ok`` holds, else all of ``old``, bit for bit; two trees of the same shapes."""
    return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)
