"""Divergences from a mixture of the two distributions: Jensen-Shannon and the skew KL divergences."""

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd_distill.divergences.base import AbstractSeparable, Scheduled, check_range, nonnegative
from spmd_distill.divergences.kl import ForwardKL, ReverseKL
from spmd_distill.errors import UserError

FAINT = 0.05
"""Below this factor on its gradient, relative to KL's, a Jensen-Shannon divergence is worth a warning."""


@dataclass(frozen=True)
class GeneralizedJSD(AbstractSeparable):
    """Jensen-Shannon divergence with mixture weight ``beta``: M = beta P + (1 - beta) Q of teacher P and student Q.

    ``convention="gkd"`` is Agarwal et al. 2023 (GKD, arXiv:2306.13649, equation 1):
    ``beta KL(P || M) + (1 - beta) KL(Q || M)``. It vanishes at both ends: near the minimum its gradient is
    ``beta (1 - beta)`` times that of KL, so beta = 0.99 leaves 1 % of the signal.

    ``convention="interpolation"`` divides by ``beta (1 - beta)``: it goes continuously from forward KL (beta = 0) to
    reverse KL (beta = 1), and near the minimum its gradient is that of KL for every beta.
    """

    beta: Scheduled = 0.5
    convention: Literal["gkd", "interpolation"] = "gkd"

    def __post_init__(self):
        """Check ``beta``; warn where hardly any signal is left."""
        check_range(self, "beta", 0, 1)
        if self.convention not in ("gkd", "interpolation"):
            raise UserError(
                f"GeneralizedJSD: convention is {self.convention!r}; expected 'gkd' (Agarwal et al. 2023: vanishes "
                f"at beta 0 and 1) or 'interpolation' (from forward KL at 0 to reverse KL at 1)."
            )
        if self.convention == "gkd" and isinstance(self.beta, int | float):
            signal = self.beta * (1 - self.beta)
            if signal < FAINT:
                warnings.warn(
                    f"GeneralizedJSD with beta {self.beta} in the convention 'gkd' has {signal:.1%} of the gradient of "
                    f"KL. For a blend of forward and reverse KL take convention='interpolation'.",
                    stacklevel=3,
                )

    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """-[p log(m/p) / (1 - beta) + q log(m/q) / beta], times beta (1 - beta) in the convention "gkd"."""
        beta: Any = self.beta
        if self.convention == "interpolation" and isinstance(beta, int | float) and beta in (0, 1):
            return (ReverseKL() if beta else ForwardKL()).integrand(teacher_logp, student_logp)
        if self.convention == "interpolation":
            beta = jnp.clip(jnp.asarray(beta, student_logp.dtype), 1e-6, 1 - 1e-6)  # a schedule may pass through an end
        p, q, ratio = jnp.exp(teacher_logp), jnp.exp(student_logp), student_logp - teacher_logp
        of_p, of_q = -p * log_mixture(1 - beta, ratio), -q * log_mixture(beta, -ratio)
        if self.convention == "interpolation":
            return nonnegative(of_p / (1 - beta) + of_q / beta)
        return nonnegative(beta * of_p + (1 - beta) * of_q)


@dataclass(frozen=True)
class SkewKL(AbstractSeparable):
    """KL(P || lambda P + (1 - lambda) Q), DistiLLM, Ko et al. 2024 (arXiv:2402.03898, equation 5)."""

    skew: Scheduled = 0.1
    """The weight lambda of the teacher in the mixture; 0 is forward KL."""

    def __post_init__(self):
        """Check ``skew``."""
        check_range(self, "skew", 0, 1)

    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """P log(p/m) + m - p."""
        p, q, rest = jnp.exp(teacher_logp), jnp.exp(student_logp), 1 - self.skew  # type: ignore[operator]
        return nonnegative(-p * log_mixture(rest, student_logp - teacher_logp) + rest * (q - p))


@dataclass(frozen=True)
class SkewReverseKL(AbstractSeparable):
    """KL(Q || lambda Q + (1 - lambda) P), DistiLLM, Ko et al. 2024 (arXiv:2402.03898, equation 6)."""

    skew: Scheduled = 0.1
    """The weight lambda of the student in the mixture; 0 is reverse KL."""

    def __post_init__(self):
        """Check ``skew``."""
        check_range(self, "skew", 0, 1)

    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """Q log(q/m) + m - q."""
        p, q, rest = jnp.exp(teacher_logp), jnp.exp(student_logp), 1 - self.skew  # type: ignore[operator]
        return nonnegative(-q * log_mixture(rest, teacher_logp - student_logp) + rest * (p - q))


def log_mixture(weight: Any, log_ratio: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
    """``log(1 - weight + weight * exp(log_ratio))``, accurate near a ratio of 1 and at both ends of ``weight``.

    Averaging in log space; a ratio may be as extreme as exp(+-1e6).
    """
    weight = jnp.asarray(weight, log_ratio.dtype)
    near = (log_ratio > -1) & (log_ratio < 20)
    small = jnp.log1p(weight * jnp.expm1(jnp.where(near, log_ratio, 0)))
    # At weight 0 or 1 one side is log 0: a finite stand-in keeps infinity out of the derivative.
    tiny = jnp.finfo(log_ratio.dtype).tiny
    one, other = jnp.log(jnp.maximum(1 - weight, tiny)), jnp.log(jnp.maximum(weight, tiny))
    one, other = (jnp.where(w > 0, x, -1e9) for w, x in ((1 - weight, one), (weight, other)))
    large = jnp.logaddexp(one, other + jnp.where(near, 0, log_ratio))
    return jnp.where(near, small, large)
