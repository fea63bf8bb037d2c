"""What a divergence is: data for the heads, which own normalising, chunking, sharding and the backward pass.

Three kinds, by what a head must know of the vocabulary at once:

* `AbstractSeparable`: a sum over the vocabulary of one elementwise function, and therefore indifferent to how the
  vocabulary is cut. Almost every divergence is one; it is the kind to write.
* `AbstractRowwise`: anything else between two rows of logits. A head brings the whole vocabulary of a few tokens to
  one shard for it, which moves logits over the wire: use it for what cannot be separated.
* `AbstractLabelLoss`: looks at the student and the label only.

A field of a divergence (a dataclass) may be a number or a schedule of optimizer steps: `at` puts the step's value in.
"""

import abc
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd_distill.errors import UserError

Scheduled = float | Callable[[Any], Any] | jax.Array
"""A number, or a function of the optimizer step (any optax schedule), whose value in a step is an array. A schedule
moves without recompiling."""


def snake_case(cls: type) -> str:
    """The name of a class as metrics and run files write it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()


class AbstractDivergence(abc.ABC):  # noqa: B024 (its three kinds have the methods)
    """One term of an objective, without weight and temperature."""

    @property
    def name(self) -> str:
        """What metrics and run files call it: the class' name in snake case."""
        return snake_case(type(self))


class AbstractSeparable(AbstractDivergence):
    """A divergence that is a sum over the vocabulary of an elementwise function of two log-probabilities."""

    slopes_cancel: ClassVar[bool] = False
    """Whether the integrand's derivative sums to 0 over the vocabulary for ANY two distributions (as q - p does).
    A head then saves the reduction of that sum over the shards of the vocabulary."""

    coarsens: ClassVar[bool] = True
    """Whether merging tokens can only lower the value (the data-processing inequality of every f-divergence)."""

    @abc.abstractmethod
    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """The summand of every token and vocabulary entry, of the same shape, in nats.

        Both arguments are normalised log-probabilities at the term's temperature, float32 or wider, never below -1e6
        (what an impossible token has) and never NaN. The result must be >= 0 entry by entry (`nonnegative`), 0 where
        the arguments are equal, and differentiable in ``student_logp``.
        """


class AbstractRowwise(AbstractDivergence):
    """A divergence that must see all logits of a token at once."""

    own_vocabularies: ClassVar[bool] = False
    """Whether teacher and student may have different vocabularies; otherwise both are cut to the common one."""

    @abc.abstractmethod
    def per_token(
        self, teacher_logits: Float[Array, "N Vt"], student_logits: Float[Array, "N Vs"]
    ) -> Float[Array, " N"]:
        """The value of every token, >= 0, from logits divided by the term's temperature, float32 or wider.

        Only real tokens are among the columns. Differentiable in ``student_logits``.
        """


class AbstractLabelLoss(AbstractDivergence):
    """A loss of the student alone, at temperature 1. Heads know how to compute the ones of this package."""


D = TypeVar("D", bound=AbstractDivergence)


def scheduled(divergence: AbstractDivergence) -> dict[str, Callable[[Any], Any]]:
    """The divergence's parameters that are schedules, by field."""
    if not dataclasses.is_dataclass(divergence):
        return {}
    values = {f.name: getattr(divergence, f.name) for f in dataclasses.fields(divergence)}
    return {name: value for name, value in values.items() if callable(value)}


def at(divergence: D, values: Mapping[str, Any]) -> D:
    """The divergence with these values in place of its schedules."""
    return dataclasses.replace(divergence, **values) if values else divergence  # type: ignore[type-var]


def check_range(divergence: AbstractDivergence, field: str, low: float, high: float) -> None:
    """Raise `UserError` where a parameter is a number outside of ``low <= x <= high``; schedules pass."""
    value = getattr(divergence, field)
    if isinstance(value, int | float) and not low <= value <= high:  # also false for NaN
        wanted = f">= {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        raise UserError(f"{type(divergence).__name__}: {field} is {value}; expected a number {wanted}.")


@jax.custom_jvp
def nonnegative(x: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
    """Lift what rounding pushed below zero, without touching the gradient."""
    return jnp.maximum(x, 0)


nonnegative.defjvp(lambda primals, tangents: (jnp.maximum(primals[0], 0), tangents[0]))


def integrand_and_slope(
    divergence: AbstractSeparable, teacher_logp: jax.Array, student_logp: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The integrand and its derivative with respect to the student's log-probability, both elementwise."""
    return jax.jvp(lambda s: divergence.integrand(teacher_logp, s), (student_logp,), (jnp.ones_like(student_logp),))
