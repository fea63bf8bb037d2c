"""Numbers of a run file and the schedules that move them, read without jax; sentences for what is none."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spmd_distill.errors import UserError

Number = Any
"""A number, or a schedule of optimizer steps as `Schedule` has it."""


@dataclass(frozen=True)
class Schedule:
    """A number that moves with the optimizer steps: its kind, and the knots (step, value) it passes through.

    ``{linear: [a, b, n]}``, ``{cosine: [a, b, n]}`` (half a period) and ``{exponential: [a, b, n]}`` (geometric) go
    from a at step 0 to b at step n and stay there; ``{piecewise: [[0, a], [n, b], ...]}`` is a until step n, then b.
    """

    kind: str
    knots: tuple[tuple[int, float], ...]

    def at(self, step: float) -> float:
        """The value at a step, in plain Python; exact at the knots."""
        if self.kind == "piecewise":
            return [value for begin, value in self.knots if begin <= max(step, 0)][-1]
        (_, a), (steps, b) = self.knots
        if step <= 0 or step >= steps:
            return a if step <= 0 else b
        part = step / steps
        if self.kind == "exponential":
            return a * (b / a) ** part
        return a + (b - a) * (part if self.kind == "linear" else (1 - math.cos(math.pi * part)) / 2)

    def __str__(self) -> str:
        if self.kind == "piecewise":
            (_, first), *later = self.knots
            return f"{first:g}" + "".join(f", from step {step} on {value:g}" for step, value in later)
        (_, a), (steps, b) = self.knots
        return f"{a:g} to {b:g} over {steps} steps, {self.kind}"


def read_temperature(value: Any, where: str) -> float | Schedule:
    """A temperature, above 0."""
    return read_number(value, where, 0, above=True)


def read_number(
    value: Any, where: str, low: float = -math.inf, high: float = math.inf, *, above: bool = False
) -> float | Schedule:
    """A number or a schedule, between two bounds (with ``above``, more than ``low``)."""
    if not isinstance(value, Mapping):
        return read_plain(value, where, low, high, above=above, schedule=True)
    schedule = read_schedule(value, where)
    for _, x in schedule.knots:
        read_plain(x, f"{where}.{schedule.kind}", low, high, above=above)
    return schedule


def read_schedule(value: Mapping[str, Any], where: str) -> Schedule:
    """A schedule as it stands in a run file."""
    check_names(value, _FORMS, where, "schedule")
    if len(value) != 1:
        raise UserError(f"{where} is {dict(value)!r}; expected one schedule: {'; '.join(_FORMS.values())}.")
    ((kind, numbers),) = value.items()
    wrong = UserError(f"{where}.{kind} is {shown(numbers)}; expected {_FORMS[kind]}.")
    if not isinstance(numbers, list | tuple) or not numbers:
        raise wrong
    knots: Iterable[Any] = numbers
    if kind != "piecewise":
        if len(numbers) != 3:
            raise wrong
        knots = [(0, numbers[0]), (numbers[2], numbers[1])]
    read = []
    for knot in knots:
        if not isinstance(knot, list | tuple) or len(knot) != 2 or not _is_number(knot[1]):
            raise wrong
        step, x = knot
        if not isinstance(step, int) or isinstance(step, bool):
            raise wrong
        if step < 0 if not read else step <= read[-1][0]:
            what = (
                "out of order; steps increase from 0 on" if kind == "piecewise" else "at its end; it takes at least 1"
            )
            raise UserError(f"{where}.{kind} has step {step} {what}.")
        read.append((step, float(x)))
    if read[0][0] != 0:
        raise UserError(f"{where}.{kind} begins at step {read[0][0]}; the first step is 0.")
    if kind == "exponential" and min(x for _, x in read) <= 0:
        raise UserError(f"{where}.exponential is {shown(numbers)}; both ends must be above 0.")
    return Schedule(kind, tuple(read))


def read_named(value: Any, where: str, plain: str, with_parameters: str, own: str) -> tuple[str, Mapping[str, Any]]:
    """Name or import path of a class, and its parameters as written: only the class knows what they may be.

    The last three are examples for the sentence: a name, a name with its parameters, a class.
    """
    if isinstance(value, str) and value:
        return value, {}
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, parameters),) = value.items()
        parameters = {} if parameters is None else parameters
        if isinstance(name, str) and name and isinstance(parameters, Mapping):
            return name, parameters
    raise UserError(
        f"{where} is {shown(value)}; expected a name such as {plain}, a name with its parameters such as "
        f"{with_parameters}, or a class such as {own}."
    )


def check_names(found: Mapping[Any, Any], known: Iterable[str], where: str, what: str) -> None:
    """Raise `UserError` with the nearest known name for one that is not known."""
    known = list(known)
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(known) or 'none'}."
            raise UserError(f"{where}: unknown {what} {str(name)!r}. {hint}")


_FORMS = {
    "linear": "{linear: [from, to, steps]}",
    "cosine": "{cosine: [from, to, steps]}",
    "exponential": "{exponential: [from, to, steps]}",
    "piecewise": "{piecewise: [[0, value], [step, value], ...]}",
}
"""Schedules by name, as an error message shows them."""


def read_plain(
    value: Any,
    where: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: bool = False,
    schedule: bool = False,
) -> float:
    """A number that stays, between two bounds; ``schedule`` says whether a schedule would do too."""
    if not _is_number(value):
        other = f", or a schedule such as {_FORMS['linear']}" if schedule else ""
        raise UserError(f"{where} is {shown(value)}; expected a number{other}.")
    if not low <= value <= high or (above and value == low):
        begin = "" if low == -math.inf else f"above {low:g}" if above else f"at least {low:g}"
        end = "" if high == math.inf else f"at most {high:g}"
        raise UserError(f"{where} is {value}; expected a number {' and '.join(x for x in (begin, end) if x)}.")
    return float(value)


def read_count(value: Any, where: str) -> int:
    """A whole number, at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where} is {shown(value)}; expected a whole number of at least 1.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def shown(value: Any) -> str:
    """A value as an error message shows it."""
    return repr(dict(value)) if isinstance(value, Mapping) else repr(value)
