"""The learned matrix that takes a student's hidden states to the teacher's width."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spmd_distill.errors import UserError
from spmd_distill.features.base import wide
from spmd_distill.models.base import declare

PROJECTIONS = ("auto", "per_layer", "shared", "none")
"""A matrix for each pair of layers, one for all, or none; ``auto`` is what a loss says it is."""


def declare_projection(
    rngs: nnx.Rngs, init: str, student: Any, teacher: Any, stack: int | None
) -> dict[str, nnx.Param]:
    """``projection``, ``[D_s, D_t]``, born as `INITS` says; ``stack``: for each of so many pairs of layers."""
    shape, axes = (student.width, teacher.width), ("embed", "act_embed")
    return {"projection": declare(rngs, INITS[init], shape, axes, student.param_dtype, stack)}


def check_same_width(loss: Any, student: Any, teacher: Any, otherwise: str = "") -> None:
    """Raise `UserError` where two hidden states of these `DecoderConfig`s cannot be compared without a projection."""
    if student.width != teacher.width:
        raise UserError(
            f"{type(loss).__name__}: projection is none, but the student's hidden states have {student.width} channels "
            f"and the teacher's {teacher.width}; take projection per_layer or shared{otherwise}."
        )


def projected(x: Float[Array, "B M Ds"], projection: Float[Array, "Ds Dt"]) -> Float[Array, "B M Dt"]:
    """Every token by itself; sums and result in float32, or wider."""
    return jnp.einsum("bmd,de->bme", x, projection, preferred_element_type=wide(x).dtype)


def _orthogonal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if len(shape) == 2:
        return jax.nn.initializers.orthogonal()(key, shape, dtype)
    return jax.vmap(lambda k: _orthogonal(k, shape[1:], dtype))(jax.random.split(key, shape[0]))


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype) / math.sqrt(shape[-2])


def _identity(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(*shape[-2:], dtype=dtype), shape)


INITS: dict[str, Callable[..., jax.Array]] = {"orthogonal": _orthogonal, "normal": _normal, "identity": _identity}
"""Initialiser by name: (key, shape, type) of a stack of matrices or of one."""
