"""Kullback-Leibler divergences."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd_distill.divergences.base import AbstractSeparable, nonnegative


@dataclass(frozen=True)
class ForwardKL(AbstractSeparable):
    """KL(teacher || student) = sum p (log p - log q), Hinton et al. 2015 (arXiv:1503.02531), with the entropy kept.

    Covers every mode of the teacher. The summand carries q - p, whose sum over the vocabulary is 0: it makes every
    summand >= 0 and exactly 0 at p = q, so that no cancellation between tokens can push a divergence below zero.
    """

    slopes_cancel: ClassVar[bool] = True  # q - p

    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """P (log p - log q) + q - p."""
        p, q = jnp.exp(teacher_logp), jnp.exp(student_logp)
        return nonnegative(p * (teacher_logp - student_logp) + (q - p))


@dataclass(frozen=True)
class ReverseKL(AbstractSeparable):
    """KL(student || teacher) = sum q (log q - log p), as in MiniLLM, Gu et al. 2023 (arXiv:2306.08543).

    Seeks the teacher's main mode and leaves the rest. The summand carries p - q, as `ForwardKL` does q - p.
    """

    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """Q (log q - log p) + p - q."""
        p, q = jnp.exp(teacher_logp), jnp.exp(student_logp)
        return nonnegative(q * (student_logp - teacher_logp) + (p - q))
