"""Kullback-Leibler divergences."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd_distill.divergences.base import AbstractSeparable, nonnegative


def relative_entropy(
    p: Float[Array, "*NV"], q: Float[Array, "*NV"], log_ratio: Float[Array, "*NV"]
) -> Float[Array, "*NV"]:
    """``p log(p/q) + q - p``, the summand of KL(P || Q), from ``log_ratio = log p - log q``.

    q - p sums to 0 over the vocabulary: it makes every summand >= 0 and exactly 0 at p = q, so that no cancellation
    between tokens can push a divergence below zero.
    """
    return nonnegative(p * log_ratio + (q - p))


@dataclass(frozen=True)
class ForwardKL(AbstractSeparable):
    """KL(teacher || student) = sum p (log p - log q), Hinton et al. 2015 (arXiv:1503.02531), with the entropy kept.

    Covers every mode of the teacher.
    """

    slopes_cancel: ClassVar[bool] = True  # q - p

    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """P (log p - log q) + q - p."""
        return relative_entropy(jnp.exp(teacher_logp), jnp.exp(student_logp), teacher_logp - student_logp)


@dataclass(frozen=True)
class ReverseKL(AbstractSeparable):
    """KL(student || teacher) = sum q (log q - log p), as in MiniLLM, Gu et al. 2023 (arXiv:2306.08543).

    Seeks the teacher's main mode and leaves the rest.
    """

    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """Q (log q - log p) + p - q."""
        return relative_entropy(jnp.exp(student_logp), jnp.exp(teacher_logp), student_logp - teacher_logp)
