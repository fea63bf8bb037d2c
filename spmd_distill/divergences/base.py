"""What a divergence is: data for the heads, which own normalising, chunking, sharding and the backward pass."""

import abc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class AbstractSeparable(abc.ABC):
    """A divergence that is a sum over the vocabulary of an elementwise function of two log-probabilities."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What metrics call it."""

    @abc.abstractmethod
    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """The summand of every token and vocabulary entry, of the same shape, in nats.

        Both arguments are normalised log-probabilities at the term's temperature, float32 or wider, never -inf (an
        impossible token has about -1e30) and never NaN. The result must be >= 0 entry by entry (`nonnegative`), 0
        where the arguments are equal, and differentiable in ``student_logp``.
        """


@dataclass(frozen=True)
class CrossEntropy:
    """Minus the log-probability of the label, in nats, at temperature 1: the ordinary language-model loss."""

    name: str = "ce"


def nonnegative(x: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
    """Lift what rounding pushed below zero, without touching the gradient."""
    return x + lax.stop_gradient(jnp.maximum(x, 0) - x)


def integrand_and_slope(
    divergence: AbstractSeparable, teacher_logp: jax.Array, student_logp: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The integrand and its derivative with respect to the student's log-probability, both elementwise."""
    return jax.jvp(lambda s: divergence.integrand(teacher_logp, s), (student_logp,), (jnp.ones_like(student_logp),))
