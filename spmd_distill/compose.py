"""From the run file's objective to the `Objective` that is compiled, and back to words for people."""

import dataclasses
import difflib
import importlib
import os
import sys
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

from spmd_distill.config.objective import (
    ObjectiveConfig,
    Schedule,
    check_names,
    read_divergence,
    read_number,
    read_schedule,
    read_support,
    read_terms,
)
from spmd_distill.divergences import DIVERGENCES, AbstractDivergence, AbstractLabelLoss, CrossEntropy, scheduled
from spmd_distill.errors import UserError
from spmd_distill.head import AGREEMENT, FULL, Sampled, Support, TopK
from spmd_distill.objective import Objective, WeightedTerm

_RUN = """
    loss learning_rate grad_norm tokens tokens_per_second perplexity_student perplexity_teacher
    step split seconds nonfinite
"""
RESERVED = frozenset(AGREEMENT) | set(_RUN.split())
"""Names of metrics that no term may have."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class OverSteps:
    """A run file's schedule as a function of the optimizer step, made of optax schedules."""

    schedule: Schedule

    def __call__(self, step: Any) -> Any:
        """The value at a step, which may be traced."""
        kind, knots = self.schedule.kind, self.schedule.knots
        if kind == "piecewise":
            constants = [optax.constant_schedule(value) for _, value in knots]
            return optax.join_schedules(constants, [step for step, _ in knots[1:]])(step)
        (_, a), (steps, b) = knots
        if kind == "linear":
            return optax.linear_schedule(a, b, steps)(step)
        if kind == "exponential":
            return optax.exponential_decay(a, steps, b / a, end_value=b)(step)
        return b + (a - b) * optax.cosine_decay_schedule(1.0, steps)(step)

    def __str__(self) -> str:
        return f"({self.schedule})"


def build_objective(
    config: ObjectiveConfig, vocab_size: int | None = None, say: Say = lambda message: None
) -> Objective:
    """The objective that the run file asks for, over the first ``vocab_size`` tokens (None: all).

    Raises `UserError` for an unknown divergence or parameter, with the nearest known one, and for a value that the
    divergence's class refuses.
    """
    support = build_support(config)
    if config.terms is None:
        objective = Objective.mix(
            build_divergence(config.divergence, "objective.divergence", say),
            _moving(read_number(config.alpha, "objective.alpha")),
            _moving(read_number(config.temperature, "objective.temperature")),
            label_smoothing=_moving(read_number(config.label_smoothing, "objective.label_smoothing")),
            z_loss=_moving(read_number(config.z_loss, "objective.z_loss")),
            support=support,
            vocab_size=vocab_size,
        )
    else:
        terms = []
        for i, term in enumerate(read_terms(config)):
            where = f"objective.terms[{i}]"
            terms.append(
                WeightedTerm(
                    build_divergence(term.divergence, f"{where}.divergence", say),
                    _moving(read_number(term.weight, f"{where}.weight")),
                    _moving(read_number(term.temperature, f"{where}.temperature")),
                    term.scale_by_temperature_squared,
                )
            )
        objective = Objective(tuple(terms), support, vocab_size)
    if taken := RESERVED & set(objective.labels):
        name = min(taken)
        raise UserError(
            f"A divergence of the objective is called {name!r}, as a metric of every run is: give its class another "
            f"name, or a property `name`."
        )
    return objective


def build_support(config: ObjectiveConfig) -> Support:
    """The support that the run file asks for."""
    found = read_support(config.support)
    if found.kind == "topk":
        return TopK(found.count)
    if found.kind == "sampled":
        fraction = {} if found.teacher_fraction is None else {"teacher_fraction": found.teacher_fraction}
        return Sampled(found.count, **fraction)
    return FULL


def build_divergence(value: Any, where: str, say: Say = lambda message: None) -> AbstractDivergence:
    """A divergence by name or import path, with its parameters; what it warns about is said."""
    name, parameters = read_divergence(value, where)
    cls = _imported(name, where) if ":" in name else _known(name, where)
    where = f"{where}.{name}"
    values = _parameters(cls, parameters, where)
    moving = {key: x for key, x in values.items() if isinstance(x, Schedule)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a schedule may begin or end where nobody would stay
        for step in sorted({step for x in moving.values() for step, _ in x.knots}):
            _make(cls, values | {key: x.at(step) for key, x in moving.items()}, where)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = _make(cls, values | {key: OverSteps(x) for key, x in moving.items()}, where)
    for warning in caught:
        say(str(warning.message))
    return made


def shared_vocabulary(wanted: int | None, tokenizer: int, teacher: int, student: int) -> int:
    """How many tokens count: as ``wanted``, or those of the tokenizer, or those that both models have."""
    least = min(teacher, student)
    if wanted is not None and wanted > least:
        raise UserError(
            f"objective.vocab_size is {wanted}, but the teacher has {teacher} tokens and the student {student}; "
            f"expected at most {least}, or null for the {min(tokenizer, least)} of tokenizer and models."
        )
    return min(tokenizer, least) if wanted is None else wanted


def describe(objective: Objective) -> str:
    """The objective in one line: every term with its weight, and the support if it is not the whole vocabulary."""
    support = objective.support
    over = ""
    if isinstance(support, TopK):
        over = f", over the teacher's {support.k} likeliest tokens and the rest as one"
    elif isinstance(support, Sampled):
        share = f"{support.teacher_fraction:.0%} by the teacher"
        over = f", over {support.draws} sampled tokens ({share})"
    return " + ".join(describe_terms(objective)) + over


def describe_terms(objective: Objective) -> list[str]:
    """Every term as ``0.9 T^2 x forward_kl at T = 2``."""
    found = []
    for term in objective.terms:
        cold = not callable(term.temperature) and term.temperature == 1
        square = " T^2" if term.squared and not cold else ""
        at = "" if cold or isinstance(term.divergence, AbstractLabelLoss) else f" at T = {_said(term.temperature)}"
        found.append(f"{_said(term.weight)}{square} x {_called(term.divergence)}{at}")
    return found


def describe_vocabulary(objective: Objective, tokenizer: int, teacher: int, student: int) -> str:
    """How many tokens count, and the models' own numbers where these differ."""
    count = objective.vocab_size if objective.vocab_size is not None else min(teacher, student)
    if count == teacher == student:
        return f"vocabulary: {count} tokens"
    what = "tokens of the tokenizer" if count == tokenizer else "tokens"
    return f"vocabulary: {count} {what}; teacher has {teacher}, student {student} rows"


def moving_numbers(objective: Objective, step: int) -> dict[str, float]:
    """What the objective's schedules say at an optimizer step: ``forward_kl.weight``, ``skew_kl.skew`` and so on."""
    found: dict[str, Any] = {}
    for label, term in zip(objective.labels, objective.terms, strict=True):
        found |= {f"{label}.weight": term.weight, f"{label}.temperature": term.temperature}
        found |= {f"{label}.{name}": value for name, value in scheduled(term.divergence).items()}
    return {name: float(np.asarray(value(step))) for name, value in found.items() if callable(value)}


def _known(name: str, where: str) -> type[AbstractDivergence]:
    if name not in DIVERGENCES:
        near = difflib.get_close_matches(name, DIVERGENCES, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"{where} is {name!r}, which is unknown.{hint} Known are {', '.join(sorted(DIVERGENCES))}; a class of your "
            f"own is given as my_module:MyDivergence."
        )
    return DIVERGENCES[name]


def _imported(path: str, where: str) -> type[AbstractDivergence]:
    """A class by ``module:Class``; modules are looked for in the current folder, then where Python looks."""
    module, _, name = path.partition(":")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{where} is {path!r}, but there is no module {error.name!r} in the current folder nor on Python's path."
        ) from error
    except Exception as error:  # whatever the user's own code raises
        raise UserError(f"{where} is {path!r}; importing it raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    if not (isinstance(found, type) and issubclass(found, AbstractDivergence)):
        what = "has nothing of that name" if found is None else "is no divergence"
        raise UserError(
            f"{where} is {path!r}, which {what}; expected a subclass of AbstractSeparable or AbstractRowwise."
        )
    return found


def _parameters(cls: type[AbstractDivergence], parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values for a divergence's fields: numbers where they are numbers, schedules where it takes schedules."""
    is_data = dataclasses.is_dataclass(cls)
    known = [f.name for f in dataclasses.fields(cls) if f.init and f.name != "name"] if is_data else []
    check_names(parameters, known, where, "parameter")
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # a name that only a type checker sees: the class must check its fields itself
        hints = {}
    found = {}
    for name, value in parameters.items():
        hint = hints.get(name, Any)
        kinds = typing.get_args(hint) or (hint,)
        if typing.get_origin(hint) is typing.Literal and value not in kinds:
            raise UserError(f"{where}.{name} is {value!r}; expected {' or '.join(map(repr, kinds))}.")
        if any(typing.get_origin(kind) is Callable for kind in kinds):
            found[name] = read_number(value, f"{where}.{name}")
        elif float in kinds and isinstance(value, Mapping):
            read_schedule(value, f"{where}.{name}")
            raise UserError(f"{where}.{name} is a schedule, but its class takes a number that stays.")
        elif float in kinds and value is not None:
            found[name] = read_number(value, f"{where}.{name}")
        else:
            found[name] = value
    return found


def _make(cls: type[AbstractDivergence], values: Mapping[str, Any], where: str) -> AbstractDivergence:
    try:
        return cls(**values)
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error


def _moving(value: Any) -> Any:
    return OverSteps(value) if isinstance(value, Schedule) else value


def _said(value: Any) -> str:
    if not callable(value):
        return f"{value:g}"
    return str(value) if type(value).__str__ is not object.__str__ else "(a schedule)"


def _called(divergence: AbstractDivergence) -> str:
    """The divergence's name with its parameters."""
    values = {} if not dataclasses.is_dataclass(divergence) else {
        f.name: getattr(divergence, f.name) for f in dataclasses.fields(divergence) if f.name != "name"
    }  # fmt: skip
    if isinstance(divergence, CrossEntropy) and divergence.label_smoothing == 0:
        values = {}
    said = [f"{k} {_said(v) if callable(v) or isinstance(v, int | float) else v}" for k, v in values.items()]
    return divergence.name + (f"({', '.join(said)})" if said else "")
