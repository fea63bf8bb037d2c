"""Losses that a run file names: a class of ours or of the user's own, its parameters, and schedules for those."""

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

import optax

from spmd_distill.config.numbers import Schedule, check_names, read_number, read_schedule
from spmd_distill.errors import UserError

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


def moving(value: float | Schedule) -> Any:
    """A number as it is, a schedule as a function of the optimizer step."""
    return OverSteps(value) if isinstance(value, Schedule) else value


@dataclass(frozen=True)
class Kind:
    """A kind of class that run files name."""

    base: type
    """What a class of the user's own must be a subclass of."""
    known: Mapping[str, type]
    """Ours, by name."""
    said: str
    """What one is called in a sentence: ``divergence``."""
    example: str
    """How a class of the user's own is given: ``my_module:MyDivergence``."""
    bases: str
    """What the user's own class may be a subclass of, in words."""


def build_class(
    kind: Kind, name: str, parameters: Mapping[str, Any], where: str, say: Say = lambda message: None
) -> Any:
    """An object of the class called ``name``, or at that import path, with its parameters; its warnings are said.

    Raises `UserError` for an unknown class or parameter, with the nearest known one, and for a value that the class
    refuses, at any knot of a schedule.
    """
    cls = _imported(kind, name, where) if ":" in name else _known(kind, name, where)
    where = f"{where}.{name}"
    values = _parameters(cls, parameters, where)
    scheduled = {key: x for key, x in values.items() if isinstance(x, Schedule)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a schedule may begin or end where nobody would stay
        for step in sorted({step for x in scheduled.values() for step, _ in x.knots}):
            _make(cls, values | {key: x.at(step) for key, x in scheduled.items()}, where)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = _make(cls, values | {key: OverSteps(x) for key, x in scheduled.items()}, where)
    for warning in caught:
        say(str(warning.message))
    return made


def _known(kind: Kind, name: str, where: str) -> type:
    if name not in kind.known:
        near = difflib.get_close_matches(name, kind.known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"{where} is {name!r}, which is unknown.{hint} Known are {', '.join(sorted(kind.known))}; a class of your "
            f"own is given as {kind.example}."
        )
    return kind.known[name]


def _imported(kind: Kind, path: str, where: str) -> type:
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
    if not (isinstance(found, type) and issubclass(found, kind.base)):
        what = "has nothing of that name" if found is None else f"is no {kind.said}"
        raise UserError(f"{where} is {path!r}, which {what}; expected a subclass of {kind.bases}.")
    return found


def _parameters(cls: Any, parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values for a class' fields: numbers where they are numbers, schedules where it takes schedules."""
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


def _make(cls: Any, values: Mapping[str, Any], where: str) -> Any:
    try:
        return cls(**values)
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error
