"""Numbers of a run as curves: taken from its lines, thinned, smoothed, and written down short."""

import itertools
import math

from spmd_distill.report.read import Run

PIECES = 150
"""A curve of more than twice so many points is cut into so many equal pieces, of which the lowest and the highest point
stay: nothing is made up, and no spike is lost. Many runs on one page get fewer pieces each."""

Points = list[tuple[int, float]]


def points(run: Run, split: str, metric: str, factor: float = 1.0, of_set: str | None = None) -> Points:
    """(step, value) of every finite value of a metric, in the order of steps."""
    lines = run.evaluations(of_set) if split == "eval" else [line for line in run.lines if line.split == split]
    found = [(line.step, line.values[metric] * factor) for line in lines if metric in line.values]
    return sorted((x, y) for x, y in found if math.isfinite(y))


def pieces_for(runs: int) -> int:
    """How many pieces a curve may have beside those of other runs."""
    return max(30, min(PIECES, 4 * PIECES // max(runs, 1)))


def thinned(curve: Points, pieces: int = PIECES) -> Points:
    """The lowest and the highest point of every piece, and both ends; all of a curve that is short."""
    if len(curve) <= 2 * pieces:
        return curve
    kept = {0, len(curve) - 1}
    for a, b in _pieces(len(curve), pieces):
        kept.add(min(range(a, b), key=lambda i: curve[i][1]))
        kept.add(max(range(a, b), key=lambda i: curve[i][1]))
    return [curve[i] for i in sorted(kept)]


def smoothed(curve: Points, pieces: int = PIECES) -> Points:
    """The mean over a fortieth of the curve, at both ends and in the middle of every piece.

    It is centred. Towards the beginning, where curves fall fast, it is taken over less on both sides; towards the end,
    where they are level, over what is left.
    """
    half = max(len(curve) // 80, 1)
    sums = [0.0, *itertools.accumulate(y for _, y in curve)]

    def mean(i: int) -> float:
        reach = min(half, i)
        a, b = i - reach, min(i + reach + 1, len(curve))
        return (sums[b] - sums[a]) / (b - a)

    if len(curve) <= pieces:
        at = range(len(curve))
    else:
        at = sorted({0, len(curve) - 1, *((a + b) // 2 for a, b in _pieces(len(curve), pieces))})
    return [(curve[i][0], mean(i)) for i in at]


def _pieces(count: int, pieces: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise(round(i * count / pieces) for i in range(pieces + 1)))


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about so many."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    size = 10.0 ** math.floor(math.log10(span / count))
    size *= next((m for m in (1, 2, 5, 10) if span / (size * m) <= count), 10)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [float(f"{i * size:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from ``low`` to ``high``, with 2 and 5 times them where the decades are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    wide = len(decades) > 4
    step = max(1, len(decades) // 6)
    found = [m * 10.0**e for e in decades[::step] for m in ((1,) if wide else (1, 2, 5))]
    inside = [float(f"{x:.6g}") for x in found if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)]
    return inside if len(inside) > 1 else ticks(low, high)


def number(value: float) -> str:
    """A number of an axis or a table, short: four digits, with k, M, G or T where it is large."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else {math.inf: "∞", -math.inf: "-∞"}.get(value, "not a number")
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            unit = 1e3 if name == "k" else unit
            return f"{value / unit:.4g}{name}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"
