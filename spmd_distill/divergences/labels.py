"""Losses of the student alone: cross-entropy on the labels, and the z-loss."""

from dataclasses import dataclass

from spmd_distill.divergences.base import AbstractLabelLoss, Scheduled, check_range


@dataclass(frozen=True)
class CrossEntropy(AbstractLabelLoss):
    """Minus the log-probability of the label, in nats, at temperature 1: the ordinary language-model loss."""

    label_smoothing: Scheduled = 0.0
    """The part of the target that is spread evenly over all V real tokens, the label among them (Szegedy et al. 2016,
    arXiv:1512.00567, section 7; the definition of `optax.smooth_labels` and `torch.nn.CrossEntropyLoss`)."""

    name: str = "ce"

    def __post_init__(self):
        """Check ``label_smoothing``."""
        check_range(self, "label_smoothing", 0, 1)


@dataclass(frozen=True)
class ZLoss(AbstractLabelLoss):
    """``logsumexp(student logits)^2``: keeps logits from drifting (PaLM, Chowdhery et al. 2022, arXiv:2204.02311)."""

    name: str = "z_loss"
