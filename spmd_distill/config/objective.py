"""The run file's objective: what may be written there, read without jax.

A setting stays in `ObjectiveConfig` as it was written, so that a run's resolved settings are a run file. The readers
turn it into names, numbers and `Schedule`s, and raise `UserError` for all that is wrong whatever the divergence.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from spmd_distill.errors import UserError

Number = Any
"""A number, or a schedule of optimizer steps as `Schedule` has it."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """``alpha T^2 divergence(teacher, student; T) + (1 - alpha) cross-entropy(labels) + z_loss logsumexp^2``."""

    divergence: Any = "forward_kl"
    """A name, ``{name: {parameter: value}}``, or a class of your own by its import path, ``my_module:MyDivergence``."""
    alpha: Number = 0.9
    """The divergence's weight; cross-entropy has the rest. A number, or a schedule: ``{linear: [0.9, 0.5, 100]}``."""
    temperature: Number = 1.0
    """What the logits of both models are divided by in the divergence; a number or a schedule."""
    label_smoothing: Number = 0.0
    """The part of the cross-entropy's target that is spread evenly over the vocabulary."""
    z_loss: Number = 0.0
    """The weight of the squared log-sum-exp of the student's logits, which keeps them from drifting."""
    support: Any = "full"
    """Tokens that divergences look at: ``full``, ``{topk: 64}``, ``{sampled: 32}``, or
    ``{sampled: {draws: 32, teacher_fraction: 1.0}}``."""
    terms: Any = None
    """A list that replaces divergence, alpha, temperature, label_smoothing and z_loss: ``[{divergence: ..., weight:
    1.0, temperature: 1.0, scale_by_temperature_squared: true}, ...]``."""
    vocab_size: int | None = None
    """Tokens of the vocabulary that count; null takes the tokenizer's where these are fewer than the models'."""


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


@dataclass(frozen=True)
class TermConfig:
    """One entry of ``objective.terms``."""

    divergence: Any
    """As in the section; also ``{ce: {label_smoothing: 0.1}}`` and ``z_loss``, the losses on the labels."""
    weight: Number = 1.0
    """What the term's mean over valid tokens is multiplied by."""
    temperature: Number = 1.0
    """What the logits of both models are divided by."""
    scale_by_temperature_squared: bool = True
    """Multiply the term by the temperature squared, so that its gradient keeps its size."""


@dataclass(frozen=True)
class SupportConfig:
    """``full``; or ``topk`` of ``count`` tokens; or ``sampled`` with ``count`` draws."""

    kind: str
    count: int = 0
    teacher_fraction: float | None = None


def check_objective(config: ObjectiveConfig) -> None:
    """Raise `UserError` for everything that is wrong whatever the divergence and the models."""
    read_support(config.support)
    if config.vocab_size is not None and config.vocab_size < 1:
        raise UserError(f"objective.vocab_size is {config.vocab_size}; it must be at least 1, or null.")
    read_divergence(config.divergence, "objective.divergence")
    read_number(config.alpha, "objective.alpha", 0, 1)
    read_temperature(config.temperature, "objective.temperature")
    read_number(config.label_smoothing, "objective.label_smoothing", 0, 1)
    read_number(config.z_loss, "objective.z_loss", 0)
    for i, term in enumerate(read_terms(config)):
        where = f"objective.terms[{i}]"
        read_divergence(term.divergence, f"{where}.divergence")
        read_number(term.weight, f"{where}.weight")
        read_temperature(term.temperature, f"{where}.temperature")


def read_terms(config: ObjectiveConfig) -> list[TermConfig]:
    """The entries of ``objective.terms``, none where it is null."""
    if config.terms is None:
        return []
    if not isinstance(config.terms, list | tuple) or not config.terms:
        raise UserError(f"objective.terms is {config.terms!r}; expected a list of terms such as {{divergence: ce}}.")
    for name in ("divergence", "alpha", "temperature", "label_smoothing", "z_loss"):
        default = ObjectiveConfig.__dataclass_fields__[name].default
        if getattr(config, name) != default:
            raise UserError(
                f"objective.terms replaces objective.{name}, which is {getattr(config, name)!r}: say it in a term "
                f"instead, or take terms away."
            )
    found = []
    for i, term in enumerate(config.terms):
        where = f"objective.terms[{i}]"
        if not isinstance(term, Mapping):
            raise UserError(f"{where} is {term!r}; expected a mapping such as {{divergence: forward_kl, weight: 0.9}}.")
        check_names(term, [f.name for f in fields(TermConfig)], where, "setting")
        if missing := [f.name for f in fields(TermConfig) if f.default is MISSING and f.name not in term]:
            raise UserError(f"{where} has no {missing[0]}: {dict(term)!r}.")
        if not isinstance(square := term.get("scale_by_temperature_squared", True), bool):
            raise UserError(f"{where}.scale_by_temperature_squared is {square!r}; expected true or false.")
        found.append(TermConfig(**term))
    return found


def read_divergence(value: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    """Name or import path, and parameters as written: only their class knows what they may be."""
    if isinstance(value, str) and value:
        return value, {}
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, parameters),) = value.items()
        parameters = {} if parameters is None else parameters
        if isinstance(name, str) and name and isinstance(parameters, Mapping):
            return name, parameters
    raise UserError(
        f"{where} is {_shown(value)}; expected a name such as forward_kl, a name with its parameters such as "
        f"{{skew_kl: {{skew: 0.1}}}}, or a class such as my_module:MyDivergence."
    )


def read_support(value: Any) -> SupportConfig:
    """What ``objective.support`` says."""
    if value == "full":
        return SupportConfig("full")
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "topk":
            return SupportConfig("topk", _count(inner, "objective.support.topk"))
        if kind == "sampled" and not isinstance(inner, Mapping):
            return SupportConfig("sampled", _count(inner, "objective.support.sampled"))
        if kind == "sampled":
            where = "objective.support.sampled"
            check_names(inner, ["draws", "teacher_fraction"], where, "setting")
            draws = _count(inner.get("draws"), f"{where}.draws")
            if "teacher_fraction" not in inner:
                return SupportConfig("sampled", draws)
            fraction = _plain(inner["teacher_fraction"], f"{where}.teacher_fraction", 0, 1, above=True)
            return SupportConfig("sampled", draws, fraction)
    raise UserError(f"objective.support is {_shown(value)}; expected full, {{topk: 64}} or {{sampled: 32}}.")


def read_temperature(value: Any, where: str) -> float | Schedule:
    """A temperature, above 0."""
    return read_number(value, where, 0, above=True)


def read_number(
    value: Any, where: str, low: float = -math.inf, high: float = math.inf, *, above: bool = False
) -> float | Schedule:
    """A number or a schedule, between two bounds (with ``above``, more than ``low``)."""
    if not isinstance(value, Mapping):
        return _plain(value, where, low, high, above=above, schedule=True)
    schedule = read_schedule(value, where)
    for _, x in schedule.knots:
        _plain(x, f"{where}.{schedule.kind}", low, high, above=above)
    return schedule


def read_schedule(value: Mapping[str, Any], where: str) -> Schedule:
    """A schedule as it stands in a run file."""
    check_names(value, _FORMS, where, "schedule")
    if len(value) != 1:
        raise UserError(f"{where} is {dict(value)!r}; expected one schedule: {'; '.join(_FORMS.values())}.")
    ((kind, numbers),) = value.items()
    wrong = UserError(f"{where}.{kind} is {_shown(numbers)}; expected {_FORMS[kind]}.")
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
        raise UserError(f"{where}.exponential is {_shown(numbers)}; both ends must be above 0.")
    return Schedule(kind, tuple(read))


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


def _plain(
    value: Any, where: str, low: float, high: float = math.inf, *, above: bool = False, schedule: bool = False
) -> float:
    if not _is_number(value):
        other = f", or a schedule such as {_FORMS['linear']}" if schedule else ""
        raise UserError(f"{where} is {_shown(value)}; expected a number{other}.")
    if not low <= value <= high or (above and value == low):
        begin = "" if low == -math.inf else f"above {low:g}" if above else f"at least {low:g}"
        end = "" if high == math.inf else f"at most {high:g}"
        raise UserError(f"{where} is {value}; expected a number {' and '.join(x for x in (begin, end) if x)}.")
    return float(value)


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where} is {_shown(value)}; expected a whole number of at least 1.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return repr(dict(value)) if isinstance(value, Mapping) else repr(value)
