"""Divergences between the teacher's and the student's distribution of the next token, and losses on the label.

Each is a small final class; a new one is a class and a line here, and every head, mapper, layout and test takes it.
"""

from spmd_distill.divergences.alpha import Alpha, AlphaBeta
from spmd_distill.divergences.base import AbstractDivergence as AbstractDivergence
from spmd_distill.divergences.base import AbstractLabelLoss as AbstractLabelLoss
from spmd_distill.divergences.base import AbstractRowwise as AbstractRowwise
from spmd_distill.divergences.base import AbstractSeparable as AbstractSeparable
from spmd_distill.divergences.base import Scheduled as Scheduled
from spmd_distill.divergences.base import at as at
from spmd_distill.divergences.base import integrand_and_slope as integrand_and_slope
from spmd_distill.divergences.base import scheduled as scheduled
from spmd_distill.divergences.base import snake_case as snake_case
from spmd_distill.divergences.distances import SquaredHellinger, TotalVariation
from spmd_distill.divergences.kl import ForwardKL, ReverseKL
from spmd_distill.divergences.kl import relative_entropy as relative_entropy
from spmd_distill.divergences.labels import CrossEntropy, ZLoss
from spmd_distill.divergences.mixtures import GeneralizedJSD, SkewKL, SkewReverseKL
from spmd_distill.divergences.rowwise import NormalizedLogitMSE, SortedLogitULD

__all__ = [
    "Alpha",
    "AlphaBeta",
    "CrossEntropy",
    "ForwardKL",
    "GeneralizedJSD",
    "NormalizedLogitMSE",
    "ReverseKL",
    "SkewKL",
    "SkewReverseKL",
    "SortedLogitULD",
    "SquaredHellinger",
    "TotalVariation",
    "ZLoss",
]

DIVERGENCES: dict[str, type[AbstractDivergence]] = {
    cls().name: cls
    for cls in (
        ForwardKL, ReverseKL, GeneralizedJSD, SkewKL, SkewReverseKL, TotalVariation, SquaredHellinger, Alpha, AlphaBeta,
        SortedLogitULD, NormalizedLogitMSE, CrossEntropy, ZLoss,
    )
}  # fmt: skip
"""Divergence by the name that run files use."""
