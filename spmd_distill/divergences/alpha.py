"""The alpha and alpha-beta families of divergences."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd_distill.divergences.base import AbstractSeparable, Scheduled, check_range, nonnegative
from spmd_distill.errors import UserError


@dataclass(frozen=True)
class Alpha(AbstractSeparable):
    """Amari's alpha-divergence, ``(sum p^alpha q^(1 - alpha) - 1) / (alpha (alpha - 1))``, for 0 <= alpha <= 1.

    Reverse KL at alpha = 0, four times `SquaredHellinger` at 1/2, forward KL at 1; near the minimum its gradient is
    that of KL for every alpha (Amari 2016, Information Geometry and Its Applications, section 3.5).
    """

    alpha: Scheduled = 0.5

    def __post_init__(self):
        """Check ``alpha``."""
        check_range(self, "alpha", 0, 1)

    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """[alpha p + (1 - alpha) q - p^alpha q^(1 - alpha)] / (alpha (1 - alpha))."""
        return alpha_beta(self.alpha, 1 - self.alpha, teacher_logp, student_logp)  # type: ignore[operator]


@dataclass(frozen=True)
class AlphaBeta(AbstractSeparable):
    """The alpha-beta divergence of ABKD, Wang et al. 2025 (arXiv:2505.04560), for alpha, beta >= 0, not both 0.

    ``sum [alpha/c p^c + beta/c q^c - p^alpha q^beta] / (alpha beta)`` with ``c = alpha + beta`` (Cichocki et al. 2011).
    Forward KL at (1, 0), reverse KL at (0, 1), `Alpha` where they add up to 1. Elsewhere it is no f-divergence, so a
    coarser vocabulary may have a higher value.
    """

    alpha: Scheduled = 0.2
    beta: Scheduled = 0.7

    coarsens: ClassVar[bool] = False

    def __post_init__(self):
        """Check both parameters."""
        for field in ("alpha", "beta"):
            check_range(self, field, 0, float("inf"))
        if isinstance(self.alpha, int | float) and isinstance(self.beta, int | float) and not self.alpha + self.beta:
            raise UserError("AlphaBeta: alpha and beta are both 0; at least one must be above.")

    def integrand(self, teacher_logp: Float[Array, "*NV"], student_logp: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
        """[alpha/c p^c + beta/c q^c - p^alpha q^beta] / (alpha beta)."""
        return alpha_beta(self.alpha, self.beta, teacher_logp, student_logp)


def alpha_beta(a: Any, b: Any, log_p: Float[Array, "*NV"], log_q: Float[Array, "*NV"]) -> Float[Array, "*NV"]:
    """The integrand of `AlphaBeta`, accurate where the smaller parameter goes to 0 and where p and q are close.

    With a >= b and c = a + b it is ``[(q^c - p^c)/c - p^c (exp(b log(q/p)) - 1)/b] / a``; the divergence is symmetric
    under exchanging (a, p) with (b, q), which brings any two parameters into that order.
    """
    kl = isinstance(a, int | float) and isinstance(b, int | float) and min(a, b) == 0
    a, b = (jnp.asarray(x, log_p.dtype) for x in (a, b))
    swap = b > a
    a, b = jnp.maximum(a, b), jnp.minimum(a, b)
    log_p, log_q = jnp.where(swap, log_q, log_p), jnp.where(swap, log_p, log_q)
    c, ratio = a + b, log_q - log_p
    p_c, q_c = jnp.exp(c * log_p), jnp.exp(c * log_q)
    if kl:
        quotient = p_c * ratio
    else:
        b = jnp.maximum(b, 1e-6)  # a schedule may reach the end
        near = jnp.abs(b * ratio) < 1
        quotient = p_c * jnp.expm1(jnp.where(near, b * ratio, 0))
        quotient = jnp.where(near, quotient, jnp.exp(a * log_p + b * log_q) - p_c) / b
    return nonnegative(((q_c - p_c) / c - quotient) / a)
