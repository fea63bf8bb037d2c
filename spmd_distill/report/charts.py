"""Curves as inline SVG: one panel a metric, one colour a run."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from spmd_distill.report.read import Run

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b8a100")
"""Told apart also without red and green (Okabe and Ito); a ninth run begins anew."""
MOST_POINTS = 400
"""Points of a curve; longer ones are drawn as means over so many equal pieces."""
WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 30


@dataclass(frozen=True)
class Panel:
    """A metric and how it is drawn."""

    title: str
    unit: str
    metric: str
    factor: float = 1.0
    teacher: str | None = None
    """A metric of the same unit that is drawn as a dashed line."""
    logarithmic: bool = False
    from_zero: bool = False


PANELS = (
    Panel("KL to the teacher", "nats per token", "kl", from_zero=True),
    Panel("Cross entropy", "nats per token", "ce_student", teacher="ce_teacher"),
    Panel("Top-1 agreement", "%", "top1", 100.0),
    Panel("Acceptance rate", "%", "acceptance", 100.0),
    Panel("Objective", "weighted loss", "loss"),
    Panel("Gradient norm, before clipping", "global norm", "grad_norm", logarithmic=True),
    Panel("Learning rate", "", "learning_rate", from_zero=True),
    Panel("Throughput", "tokens per second", "tokens_per_second", from_zero=True),
)

Points = list[tuple[float, float]]


def points(run: Run, split: str, metric: str, factor: float = 1.0, of_set: str | None = None) -> Points:
    """(step, value) of every finite value of a metric."""
    lines = run.evaluations(of_set) if split == "eval" else [line for line in run.lines if line.split == split]
    found = [(line.step, line.values[metric] * factor) for line in lines if metric in line.values]
    return [(float(x), y) for x, y in found if math.isfinite(y)]


def thinned(curve: Points, most: int = MOST_POINTS) -> Points:
    """At most so many points: means over equal pieces of the curve."""
    if len(curve) <= most:
        return curve
    edges = [round(i * len(curve) / most) for i in range(most + 1)]
    pieces = [curve[a:b] for a, b in itertools.pairwise(edges)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in pieces]


def smoothed(curve: Points) -> Points:
    """The centred moving average over a fortieth of the curve."""
    half = max(len(curve) // 80, 1)
    sums = [0.0]
    for _, y in curve:
        sums.append(sums[-1] + y)
    ends = [(max(i - half, 0), min(i + half + 1, len(curve))) for i in range(len(curve))]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(curve, ends, strict=True)]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about so many."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    step = 10 ** math.floor(math.log10(span / count))
    step *= next((m for m in (1, 2, 5, 10) if span / (step * m) <= count), 10)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number of an axis or a table, short."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size < 1e-3 else f"{value:.4g}"


def chart(panel: Panel, runs: Sequence[Run], of_set: str | None = None) -> str | None:
    """The panel as an SVG figure; None where no run has the metric."""
    series = []
    for index, run in enumerate(runs):
        train = [] if of_set else points(run, "train", panel.metric, panel.factor)
        series.append((index, run, train, points(run, "eval", panel.metric, panel.factor, of_set)))
    if not any(train or held for *_, train, held in series):
        return None
    teacher = points(runs[0], "eval", panel.teacher, panel.factor, of_set) if panel.teacher else []
    x_of, y_of, axes = _axes(panel, series, teacher)

    def path(curve: Points) -> str:
        return " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in curve)

    drawn = [axes]
    if teacher:
        level = y_of(teacher[-1][1])
        drawn.append(
            f'<line class="teacher" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>'
            f'<text class="teacher-name" x="{WIDTH - RIGHT}" y="{level - 4:.1f}" text-anchor="end">teacher</text>'
        )
    for index, run, train, held in series:
        colour = COLOURS[index % len(COLOURS)]
        drawn.append(f'<g class="run run-{index}" style="--c:{colour}"><title>{escape(run.name)}</title>')
        if train:
            thin = thinned(train)
            noisy = len(train) > 40
            drawn.append(f'<polyline class="train{" faint" if noisy else ""}" points="{path(thin)}"/>')
            if noisy:
                drawn.append(f'<polyline class="smooth" points="{path(thinned(smoothed(train)))}"/>')
            if panel.metric == "grad_norm":
                drawn += _skipped(run, x_of)
        if held:
            drawn.append(f'<polyline class="held" points="{path(held)}"/>')
            drawn += [f'<circle class="point" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3"/>' for x, y in held]
        drawn.append("</g>")
    title = f"{panel.title}{f', {of_set}' if of_set else ''}"
    label = f"{title} by optimizer step, {panel.unit}" if panel.unit else f"{title} by optimizer step"
    return (
        f'<figure class="chart" data-metric="{panel.metric}" data-set="{escape(of_set or "")}">'
        f"<figcaption>{escape(title)} <span>{escape(panel.unit)}</span></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg></figure>'
    )


def _skipped(run: Run, x_of: Callable[..., float]) -> list[str]:
    """Steps that changed nothing, as crosses at the foot of the panel."""
    steps = [line.step for line in run.lines if line.split == "train" and line.values.get("skipped")]
    at = HEIGHT - BOTTOM - 8
    return [
        f'<path class="skipped" d="M{x_of(step) - 3:.1f} {at} l6 6 m0 -6 l-6 6"><title>{step} skipped</title></path>'
        for step in steps[:200]
    ]


def _axes(panel: Panel, series: list, teacher: Points) -> tuple[Callable[..., float], Callable[..., float], str]:
    curves = [curve for *_, train, held in series for curve in (train, held) if curve]
    last = max(x for curve in curves for x, _ in curve)
    first = min(x for curve in curves for x, _ in curve)
    low, high = _range([*curves, teacher[-1:]])
    log = panel.logarithmic and low > 0 and high / low > 30
    if panel.from_zero and not log:
        low = min(low, 0.0)
    if high <= low:
        low, high = (low * 0.9, high * 1.1) if low else (-1.0, 1.0)
    if log:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
        marks = [10.0**e for e in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    else:
        margin = 0.05 * (high - low)
        low, high = low - (0 if panel.from_zero and low >= 0 else margin), high + margin
        marks = ticks(low, high)
    scale = (lambda y: math.log(max(y, low))) if log else (lambda y: y)
    span, width = (scale(high) - scale(low)) or 1.0, (last - first) or 1.0

    def x_of(x: float) -> float:
        return LEFT + (x - first) / width * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        inside = min(max(y, low), high)  # what is outside the range lies on its border
        return HEIGHT - BOTTOM - (scale(inside) - scale(low)) / span * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{y_of(y) + 3.5:.1f}" text-anchor="end">{number(y)}</text>'
        for y in marks
    ]
    parts += [
        f'<text class="tick" x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{x:,.0f}</text>'
        for x in ticks(first, last, 6)
        if x == round(x)
    ]
    where = f'data-x0="{first}" data-x1="{last}" data-left="{LEFT}" data-right="{WIDTH - RIGHT}"'
    return x_of, y_of, f'<g class="axes" {where}>{"".join(parts)}</g>'


def _range(curves: Sequence[Points]) -> tuple[float, float]:
    """Lowest and highest value, without the few outliers of long curves."""
    lows, highs = [], []
    for curve in curves:
        values = sorted(y for _, y in curve)
        if values:
            cut = len(values) // 100
            lows.append(values[cut])
            highs.append(values[len(values) - 1 - cut])
    return min(lows), max(highs)
