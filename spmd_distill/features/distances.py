"""Distances between two rows of channels. A new one is one function, and a line in `DISTANCES`.

Each takes ``[..., D]`` of the student and of the teacher, in float32 or wider, and returns ``[...]``: finite, with
finite gradients, also where a row is zero.
"""

import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

EPSILON = 1e-6
"""Length below which a row has no direction: it is divided by ``sqrt(|x|^2 + EPSILON^2)``."""


def mse(student: Float[Array, "*rows D"], teacher: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
    """Mean over the channels of the squared difference (TinyBERT, Jiao et al. 2019, arXiv:1909.10351, eq. 8)."""
    return jnp.mean(jnp.square(student - teacher), -1)


def normalized_mse(student: Float[Array, "*rows D"], teacher: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
    """Squared distance of the rows at length (L2 norm) 1 (Sun et al. 2019, arXiv:1908.09355, eq. 7), from 0 to 4."""
    return jnp.sum(jnp.square(_unit(student) - _unit(teacher)), -1)


def cosine(student: Float[Array, "*rows D"], teacher: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
    """1 - cos of the angle between the rows (DistilBERT, Sanh et al. 2019, arXiv:1910.01108); 1 where one is zero."""
    return 1 - jnp.sum(_unit(student) * _unit(teacher), -1)


def huber(
    student: Float[Array, "*rows D"], teacher: Float[Array, "*rows D"], *, delta: float = 1.0
) -> Float[Array, "*rows"]:
    """Mean over the channels of ``e^2 / 2`` up to an error e of ``delta``, and ``delta (e - delta / 2)`` above."""
    return jnp.mean(optax.losses.huber_loss(student, teacher, delta=delta), -1)


DISTANCES: dict[str, Callable[..., jax.Array]] = {
    "mse": mse,
    "normalized_mse": normalized_mse,
    "cosine": cosine,
    "huber": huber,
}
"""Distance by name. Keywords of a function are settings of `HiddenStates` of the same name."""


def settings_of(distance: str) -> tuple[str, ...]:
    """Names of the settings that a distance takes."""
    found = inspect.signature(DISTANCES[distance]).parameters.values()
    return tuple(p.name for p in found if p.kind is p.KEYWORD_ONLY)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + EPSILON**2)
