"""Divergences between the teacher's and the student's distribution of the next token.

Each is a small final class; a new one is a new file and a line here, and every head, mapper, layout and test takes it.
"""

from spmd_distill.divergences.base import AbstractSeparable as AbstractSeparable
from spmd_distill.divergences.base import CrossEntropy as CrossEntropy
from spmd_distill.divergences.base import integrand_and_slope as integrand_and_slope
from spmd_distill.divergences.kl import ForwardKL

__all__ = ["ForwardKL"]

DIVERGENCES: dict[str, type[AbstractSeparable]] = {cls().name: cls for cls in (ForwardKL,)}
"""Divergence by the name that run files use."""
