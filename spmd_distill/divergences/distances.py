"""Bounded distances between two distributions."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd_distill.divergences.base import AbstractSeparable


@dataclass(frozen=True)
class TotalVariation(AbstractSeparable):
    """Half the L1 distance, ``sum |p - q| / 2``, between 0 and 1: 1 minus the acceptance rate of speculative sampling.

    Used for distillation by Wen et al. 2023 (arXiv:2307.15190). Its gradient does not fade near the minimum.
    """

    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """|p - q| / 2."""
        return jnp.abs(jnp.exp(student_logp) - jnp.exp(teacher_logp)) / 2


@dataclass(frozen=True)
class SquaredHellinger(AbstractSeparable):
    """``sum (sqrt p - sqrt q)^2 / 2 = 1 - sum sqrt(p q)``, between 0 and 1; a quarter of `Alpha` at 1/2."""

    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """(sqrt p - sqrt q)^2 / 2."""
        return jnp.square(jnp.exp(student_logp / 2) - jnp.exp(teacher_logp / 2)) / 2
