"""Which tokens of the vocabulary a divergence looks at: all, the teacher's likeliest, or a random sample.

A separable divergence keeps its one integrand on any of them. With ``p`` and ``q`` the two distributions of a token:

* `Full`: the sum over the vocabulary.
* `TopK`: the teacher's k likeliest tokens and ONE bucket with the rest of both distributions,
  ``sum_k g(log p_k, log q_k) + g(log(1 - sum p_k), log(1 - sum q_k))``. Merging tokens cannot raise an f-divergence, so
  the value is a lower bound, and it is exact at k = V. Without the bucket a student could move all its mass out of
  sight; with it, the mass outside must be right, and only its division is free.
* `Sampled`: ``sum_i g(log p_i, log q_i) / (n r_i)`` over n tokens drawn from ``r = f p + (1 - f) q``. Value and
  gradient are unbiased for every separable divergence (the random sampling of Anshumann et al. 2025, arXiv:2503.16870,
  has f = 1). Half and half, no weight p/r or q/r exceeds 2, and the noise fades as the student approaches the teacher.
"""

from dataclasses import dataclass

from spmd_distill.errors import UserError


class Support:
    """See the module's docstring."""


@dataclass(frozen=True)
class Full(Support):
    """The whole vocabulary."""


@dataclass(frozen=True)
class TopK(Support):
    """The teacher's ``k`` likeliest tokens, and one bucket for all others."""

    k: int

    def __post_init__(self):
        """Check ``k``."""
        if self.k < 1:
            raise UserError(f"TopK: k is {self.k}; it must be at least 1.")


@dataclass(frozen=True)
class Sampled(Support):
    """``draws`` tokens, drawn in strata from a mixture of teacher and student; see the module's docstring."""

    draws: int
    teacher_fraction: float = 0.5

    def __post_init__(self):
        """Check both settings."""
        if self.draws < 1:
            raise UserError(f"Sampled: draws is {self.draws}; it must be at least 1.")
        if not 0 < self.teacher_fraction <= 1:
            raise UserError(
                f"Sampled: teacher_fraction is {self.teacher_fraction}; expected 0 < teacher_fraction <= 1."
            )


FULL = Full()
