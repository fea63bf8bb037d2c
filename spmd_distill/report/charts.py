"""A panel as inline SVG: one colour a run, or a held-out set where there is one run."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from spmd_distill.report.axes import HEIGHT, INNER_HEIGHT, INNER_WIDTH, LEFT, RIGHT, TOP, WIDTH, Axes, apart, axes_for
from spmd_distill.report.panels import Panel
from spmd_distill.report.read import Run
from spmd_distill.report.series import Points, number, pieces_for, points, smoothed, thinned

COLOURS = 8
"""Colours that the style sheet has; a ninth run begins anew."""
MOST_MARKS = 150
_ROOM = 5
"""Beside the first and the last step, so that dots there are whole."""
_NOISY = 40
"""More points of training than this are drawn faintly, under their moving mean."""


@dataclass(frozen=True)
class Curve:
    """One run, or one held-out set of the only run, in a panel."""

    name: str
    colour: int
    group: str
    """The class of its elements, by which the legend hides them."""
    train: Points
    held: Points

    @property
    def noisy(self) -> bool:
        """Whether training is drawn faintly, under a moving mean."""
        return len(self.train) > _NOISY

    @property
    def last(self) -> float:
        """What it ends with, as its label says: held out where there is that, else in training."""
        return (self.held or smoothed(self.train))[-1][1]


def chart(panel: Panel, runs: Sequence[Run], of_set: str | None = None) -> str | None:
    """The panel as an SVG figure; None where no run has the metric.

    ``of_set`` draws a held-out set alone. Without it, the sets of a single run are drawn beside all its held-out text.
    """
    curves = [curve for curve in _curves(panel, runs, of_set) if curve.train or curve.held]
    if not curves:
        return None
    teacher = _teacher(panel, runs, of_set)
    means = [smoothed(curve.train) if curve.noisy else curve.train for curve in curves]
    whole = [line for line in (*means, *(curve.held for curve in curves), teacher[-1:]) if line]
    axes = axes_for(panel, [curve.train for curve in curves if curve.noisy], whole)
    pieces = pieces_for(len(runs))
    drawn = "".join(_drawn(curve, pieces) for curve in curves)
    clip = _clip(panel, runs)
    levels = [("teacher", teacher[-1][1], "teacher")] if teacher else []
    levels += [("clip", clip, "clipped")] if clip is not None and axes.linear.low < clip < axes.linear.high else []
    first, last = axes.x.low, axes.x.high
    drawn += "".join(f'<path class="level {kind}" d="M{first:g} {y:.5g}L{last:g} {y:.5g}"/>' for kind, y, _ in levels)
    ends = [(f"{c.group} c{c.colour}", c.last, number(c.last)) for c in curves]
    ends += [(f"level {kind}", y, name) for kind, y, name in levels]
    title = f"{panel.title}, {of_set}" if of_set else panel.title
    log = f' data-log="{axes.matrix(axes.log)}"' if axes.log else ""
    button = '<button type="button" class="scale" hidden>log</button>' if axes.log else ""
    return (
        f'<figure class="chart" tabindex="0" data-first="{first:g}" data-last="{last:g}"'
        f"{' data-log-first' if axes.log_first else ''}{' data-nats' if panel.metric.startswith('ce_') else ''}>"
        f"<figcaption>{escape(title)} <span>{escape(panel.unit)}</span>{button}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_said(title, panel, curves))}">'
        f"{_grid(axes)}{_marks(runs, axes) if panel.marks else ''}"
        f'<svg class="inner" x="{LEFT - _ROOM}" y="{TOP}" width="{INNER_WIDTH + 2 * _ROOM}" height="{INNER_HEIGHT}" '
        f'viewBox="{-_ROOM} 0 {INNER_WIDTH + 2 * _ROOM} {INNER_HEIGHT}">'
        f'<g class="plot" transform="{axes.matrix(axes.linear)}"{log}>{drawn}</g></svg>'
        f"{_ends(ends, axes)}</svg></figure>"
    )


def _curves(panel: Panel, runs: Sequence[Run], of_set: str | None) -> list[Curve]:
    def held(run: Run, name: str | None) -> Points:
        return points(run, "eval", panel.metric, panel.factor, name)

    found = []
    for index, run in enumerate(runs):
        train = [] if of_set else points(run, "train", panel.metric, panel.factor)
        found.append(Curve(run.name, index % COLOURS, f"run-{index}", train, held(run, of_set)))
    if len(runs) == 1 and of_set is None:
        for index, name in enumerate(runs[0].sets()):
            found.append(Curve(name, (index + 1) % COLOURS, f"set-{index}", [], held(runs[0], name)))
    return found


def _teacher(panel: Panel, runs: Sequence[Run], of_set: str | None) -> Points:
    if panel.teacher is None:
        return []
    found = (points(run, "eval", panel.teacher, panel.factor, of_set) for run in runs)
    return next((curve for curve in found if curve), [])


def _clip(panel: Panel, runs: Sequence[Run]) -> float | None:
    """The gradient norm from which on every run clips, where they agree on one."""
    sections = [run.config.get("optimizer") for run in runs]
    norms = {section.get("clip_norm") if isinstance(section, dict) else None for section in sections}
    norm = norms.pop() if len(norms) == 1 and panel.metric == "grad_norm" else None
    return float(norm) if isinstance(norm, (int, float)) and norm > 0 else None


def _drawn(curve: Curve, pieces: int) -> str:
    """Curves in the units of the data; a dot is a line of no length with a round end."""
    found = []

    def add(kind: str, line: Points, dots: bool = False) -> None:
        places = (f"{x} {y:.5g}" for x, y in line)
        path = "".join(f"M{at}h0" for at in places) if dots else "M" + "L".join(places)
        found.append(f'<path class="{kind}" d="{path}"/>')

    if curve.train:
        dots = len(curve.train) == 1
        add("train faint" if curve.noisy else "train", thinned(curve.train, pieces), dots)
        if curve.noisy:
            add("mean", smoothed(curve.train, pieces))
    if curve.held:
        if not curve.noisy:  # a mean leads the eye from dot to dot better than a line does
            add("held", curve.held)
        add("dots", curve.held, dots=True)
    return f'<g class="{curve.group} c{curve.colour}" data-name="{escape(curve.name)}">{"".join(found)}</g>'


def _grid(axes: Axes) -> str:
    """Lines and numbers of both axes of values, of which one is shown, and numbers of the steps."""
    parts = []
    for kind, axis in (("lin", axes.linear), ("log off", axes.log)):
        if axis is not None:
            lines = "".join(
                f'<path class="grid" d="M{LEFT} {axis.y(y):.1f}h{INNER_WIDTH}"/>'
                f'<text class="tick" x="{LEFT - 7}" y="{axis.y(y) + 3.7:.1f}" text-anchor="end">{number(y)}</text>'
                for y in axis.ticks
            )
            parts.append(f'<g class="{kind}">{lines}</g>')
    parts += [
        f'<text class="tick" x="{axes.x.x(x):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{x:,.0f}</text>'
        for x in axes.x.ticks
    ]
    return "".join(parts)


def _ends(ends: Sequence[tuple[str, float, str]], axes: Axes) -> str:
    """What each curve ends with, written where it ends, on either axis."""
    linear = apart([axes.linear.y(y) for _, y, _ in ends])
    log = apart([axes.log.y(y) for _, y, _ in ends]) if axes.log else linear
    x = WIDTH - RIGHT + 7
    return "".join(
        f'<text class="end {kind}" x="{x}" y="{a + 3.7:.1f}" data-y="{b + 3.7:.1f}">{escape(text)}</text>'
        for (kind, _, text), a, b in zip(ends, linear, log, strict=True)
    )


def _marks(runs: Sequence[Run], axes: Axes) -> str:
    """Steps at which guards acted, or a number was none, at the foot of the panel."""
    found = []
    for index, run in enumerate(runs):
        for step, (text, quiet) in list(run.marks().items())[:MOST_MARKS]:
            at = f"M{axes.x.x(step) - 3.5:.1f} {TOP + INNER_HEIGHT - 1}l3.5 -7l3.5 7z"
            kind = "mark quiet" if quiet else "mark"
            found.append(f'<path class="{kind} run-{index}" d="{at}"><title>step {step}: {escape(text)}</title></path>')
    return "".join(found)


def _said(title: str, panel: Panel, curves: Sequence[Curve]) -> str:
    """The panel in words."""
    parts = []
    for curve in curves:
        line, what = (curve.held, "held out") if curve.held else (curve.train, "in training")
        (a, begin), (b, end) = line[0], line[-1]
        parts.append(f"{curve.name}, {what}: {number(begin)} at step {a:,}, {number(end)} at step {b:,}")
    unit = f", {panel.unit}" if panel.unit else ""
    return f"{title} by optimizer step{unit}. {'; '.join(parts)}."
