"""From numbers to places of a panel: ranges, and a linear and a logarithmic axis over the same curves.

Curves stand in the page in the units of the data, and a matrix puts them in place. So the page holds each number once:
the picture, the pointer and the tests read the same ones.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spmd_distill.report.panels import Panel
from spmd_distill.report.series import Points, log_ticks, ticks

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 58, 10, 28
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


@dataclass(frozen=True)
class Axis:
    """One direction. ``logarithmic``: its numbers are powers of ten, and so are ``low`` and ``high``."""

    low: float
    high: float
    ticks: list[float]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where a number lies, from 0 to 1; what is outside lies on the border."""
        if self.logarithmic:
            value = math.log10(value) if value > 0 else self.low
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def y(self, value: float) -> float:
        """The place in the panel, from the top."""
        return TOP + (1 - self.share(value)) * INNER_HEIGHT

    def x(self, value: float) -> float:
        """The place in the panel, from the left."""
        return LEFT + self.share(value) * INNER_WIDTH


@dataclass(frozen=True)
class Axes:
    """Steps to the right; values upwards, on one axis or a choice of two."""

    x: Axis
    linear: Axis
    log: Axis | None
    log_first: bool

    def matrix(self, y: Axis) -> str:
        """What brings (step, value), or (step, log10 value), to its place within the curves' own corner."""
        sx, sy = INNER_WIDTH / (self.x.high - self.x.low), INNER_HEIGHT / (y.high - y.low)
        return f"matrix({sx:.8g} 0 0 {-sy:.8g} {-sx * self.x.low:.8g} {sy * y.high:.8g})"


def axes_for(panel: Panel, rough: Sequence[Points], whole: Sequence[Points]) -> Axes:
    """Axes for curves: all of ``whole``, and of ``rough`` what lies between its lowest and highest hundredth."""
    steps = [x for curve in (*rough, *whole) for x, _ in curve]
    first, last = min(steps), max(steps)
    x = Axis(first - 0.5, last + 0.5, [first]) if first == last else Axis(first, last, _whole(ticks(first, last, 6)))
    values = [y for curve in whole for _, y in curve]
    for curve in rough:
        ordered = sorted(y for _, y in curve)
        cut = len(ordered) // 100
        values += ordered[cut : len(ordered) - cut]
    low, high = min(values), max(values)
    log = _log(low, high) if panel.logarithmic and low > 0 and high / low > 1.5 else None
    flat = sorted(y for curve in whole for x, y in curve if x >= (first + last) / 2) or values
    return Axes(x, _linear(low, high, panel.from_zero), log, log is not None and high > 12 * flat[len(flat) // 2])


def _linear(low: float, high: float, from_zero: bool) -> Axis:
    zero = from_zero and low >= 0
    if zero:
        low = 0.0
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        low, high = (low - 0.1 * abs(low), high + 0.1 * abs(high)) if high else (0.0, 1.0)
    margin = 0.05 * (high - low)
    low, high = low if zero else low - margin, high + margin
    return Axis(low, high, ticks(low, high))


def _log(low: float, high: float) -> Axis:
    a, b = math.log10(low), math.log10(high)
    a, b = a - 0.05 * (b - a), b + 0.05 * (b - a)
    return Axis(a, b, log_ticks(10**a, 10**b), logarithmic=True)


def _whole(found: Iterable[float]) -> list[float]:
    return [x for x in found if x == round(x)]


def apart(places: Sequence[float], least: float = 11.5) -> list[float]:
    """Places of labels moved as little as it takes to keep them so far apart, within the panel."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for above, below in itertools.pairwise(order):
        moved[below] = max(moved[below], moved[above] + least)
    limit = TOP + INNER_HEIGHT - 4.0
    for i in reversed(order):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - least
    return moved
