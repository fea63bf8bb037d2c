"""Which metrics get a panel, and how each is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_distill.report.read import Run


@dataclass(frozen=True)
class Panel:
    """A metric and how it is drawn."""

    title: str
    unit: str
    metric: str
    factor: float = 1.0
    teacher: str | None = None
    """A metric of the same unit that is drawn as a dashed line: what the teacher itself reaches."""
    from_zero: bool = False
    """Whether the linear axis begins at 0."""
    logarithmic: bool = True
    """Whether there is a logarithmic axis to choose; it is chosen by itself where most of a curve would lie flat."""
    marks: bool = False
    """Whether steps that guards acted on are marked at the foot."""


PANELS = (
    Panel("KL to the teacher", "nats per token", "kl", from_zero=True),
    Panel("Cross entropy", "nats per token", "ce_student", teacher="ce_teacher"),
    Panel("Top-1 agreement", "%", "top1", 100.0, logarithmic=False),
    Panel("Acceptance rate", "%", "acceptance", 100.0, logarithmic=False),
    Panel("Objective", "weighted loss", "loss", marks=True),
    Panel("Gradient norm, before clipping", "global norm", "grad_norm", marks=True),
    Panel("Learning rate", "", "learning_rate", from_zero=True, logarithmic=False),
    Panel("Throughput", "tokens per second", "tokens_per_second", from_zero=True),
    Panel("Model operations", "Tflop per second", "flops_per_second", 1e-12, from_zero=True),
    Panel("Use of the devices", "% of their peak", "mfu", 100.0, from_zero=True, logarithmic=False),
    Panel("Waiting for data", "% of the time", "data_wait", 100.0, from_zero=True, logarithmic=False),
)

SETS = PANELS[:2]
"""What is drawn for each held-out set by itself."""

_NO_CURVES = frozenset(
    ("tokens", "skipped", "clipped", "clipped_total", "perplexity_student", "perplexity_teacher", "ce_teacher")
)


def main_panels(runs: Sequence[Run]) -> list[Panel]:
    """Those that some run has: operations a second only where nobody knows what the devices could do."""
    seen = {name for run in runs for line in run.lines for name in line.values}
    return [p for p in PANELS if p.metric in seen and not (p.metric == "flops_per_second" and "mfu" in seen)]


def other_panels(runs: Sequence[Run]) -> list[Panel]:
    """One for every other metric that moves in some run: terms of the objective, entropies, schedules, memory."""
    values: dict[str, set[float]] = {}
    for line in (line for run in runs for line in run.lines):
        for name, value in line.values.items():
            seen = values.setdefault(name, set())
            if len(seen) < 2:
                seen.add(value)
    known = {panel.metric for panel in PANELS} | _NO_CURVES
    return [Panel(name, "", name) for name, seen in values.items() if name not in known and len(seen) > 1]
