"""What is minimised: a weighted sum of terms. The ONE place that masks tokens and divides by their number."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spmd_distill.divergences import AbstractSeparable, CrossEntropy
from spmd_distill.head import AbstractHead, HeadOutput, Term
from spmd_distill.types import Batch, Unembedded

Scheduled = float | Callable[[Any], Any]
"""A number, or a function of the optimizer step (any optax schedule). A schedule moves without recompiling."""


@dataclass(frozen=True)
class WeightedTerm:
    """One summand. A divergence's gradient shrinks as 1/T^2 with its temperature T; by default that is undone."""

    divergence: AbstractSeparable | CrossEntropy
    weight: Scheduled = 1.0
    temperature: Scheduled = 1.0
    scale_by_temperature_squared: bool = True

    @property
    def for_head(self) -> Term:
        """The term without what moves during training."""
        return Term(self.divergence, None if callable(self.temperature) else float(self.temperature))


@dataclass(frozen=True)
class Objective:
    """A weighted sum of token losses, averaged over the valid tokens of the whole optimizer step."""

    terms: tuple[WeightedTerm, ...]

    @classmethod
    def mix(cls, divergence: AbstractSeparable, alpha: Scheduled = 0.9, temperature: Scheduled = 1.0) -> "Objective":
        """``alpha T^2 D(teacher, student; T) + (1 - alpha) CE(labels)``, Hinton et al. 2015 (arXiv:1503.02531).

        A part whose weight is the number 0 is left out of the program.
        """
        rest: Scheduled = (lambda step: 1 - alpha(step)) if callable(alpha) else 1 - alpha
        parts = (WeightedTerm(divergence, alpha, temperature), WeightedTerm(CrossEntropy(), rest))
        return cls(tuple(t for t in parts if callable(t.weight) or t.weight != 0))

    def coefficients(self, step: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Weights and temperatures of all terms at an optimizer step, ``[terms]`` each."""

        def at(x: Scheduled) -> jax.Array:
            return jnp.asarray(x(step) if callable(x) else x, dtype)

        temperatures = [at(t.temperature) for t in self.terms]
        weights = [
            at(t.weight) * (temp * temp if t.scale_by_temperature_squared else 1)
            for t, temp in zip(self.terms, temperatures, strict=True)
        ]
        return jnp.stack(weights), jnp.stack(temperatures)

    def __call__(
        self,
        head: AbstractHead,
        student: Unembedded,
        teacher: Unembedded,
        batch: Batch,
        step: jax.Array,
        count: jax.Array,
        *,
        agreement: bool,
        batch_axes: tuple[str, ...],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """This shard's share of the loss (its sum over valid tokens / ``count``) and the sums behind the metrics.

        ``count`` is the GLOBAL number of valid tokens of the optimizer step: adding the shares of all shards and
        micro-batches gives the mean, whatever the data-parallel width, accumulation, packing or padding.
        """
        dtype = jnp.promote_types(student.hidden.dtype, jnp.float32)
        weights, temperatures = self.coefficients(step, dtype)
        out: HeadOutput = head(
            student,
            teacher,
            batch.labels.reshape(-1),
            batch.mask.reshape(-1),
            tuple(t.for_head for t in self.terms),
            weights,
            temperatures,
            agreement=agreement,
            batch_axes=batch_axes,
        )
        loss = out.loss / jnp.maximum(count, 1).astype(dtype)
        return loss, {"loss": jax.lax.stop_gradient(out.loss), **out.sums}
