"""YAML and flags to a `RunConfig`, with errors that name the line or the flag."""

import dataclasses
import difflib
import math
import re
import types
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser

from spmd_distill.config.run import RunConfig
from spmd_distill.config.source import flatten, read_run_file
from spmd_distill.errors import UserError

_ELSEWHERE = {
    "accumulation": "data.micro_batches",
    "batch_size": "data.rows",
    "gradient_accumulation": "data.micro_batches",
    "gradient_accumulation_steps": "data.micro_batches",
    "kl": "objective.divergence",
    "learning_rate": "optimizer.learning_rate",
    "loss": "objective.divergence",
    "lr": "optimizer.learning_rate",
    "max_length": "data.length",
    "max_grad_norm": "optimizer.clip_norm",
    "max_seq_length": "data.length",
    "max_steps": "steps",
    "micro_batch_size": "data.rows",
    "model": "student.init",
    "num_layers": "student.depth",
    "num_train_steps": "steps",
    "output": "run",
    "output_dir": "run",
    "per_device_train_batch_size": "data.rows",
    "seq_len": "data.length",
    "sequence_length": "data.length",
    "teacher_model": "teacher.path",
    "warmup": "optimizer.warmup_steps",
}
"""What other trainers call our settings."""


def parse_config(arguments: Sequence[str] = (), path: str | Path | None = None) -> RunConfig:
    """Read a run file and flags (``--optimizer.learning_rate 1e-4``) on top of it; what neither sets has its default.

    Raises `UserError` naming the line or the flag for an unknown setting (and the nearest known), a value of a wrong
    type or out of its range, a file that is missing or not YAML.
    """
    given, lines = ({}, {}) if path is None else read_run_file(path)
    place = _Places(path, lines, tuple(arguments))
    _check_names(given, place)
    _check_flags(arguments, place)
    parser = ArgumentParser(exit_on_error=False, prog="spmd-distill", allow_abbrev=False)
    parser.add_class_arguments(RunConfig, fail_untyped=True)
    try:
        start = parser.parse_object(given, defaults=True) if given else None
        found = vars(parser.instantiate(parser.parse_args(list(arguments), namespace=start)))
        config = RunConfig(**{f.name: found[f.name] for f in dataclasses.fields(RunConfig)})
        _check_numbers(config, place)
        return config
    except UserError as error:
        raise place.error_of(str(error)) from None
    except (ArgumentError, TypeError, ValueError) as error:
        raise place.error_of_type(str(error), given) from error


def setting_names(cls: Any = RunConfig, prefix: str = "") -> list[str]:
    """Every setting by its dotted name."""
    names = []
    for f in dataclasses.fields(cls):
        inner = section_of(f)
        names += setting_names(inner, f"{prefix}{f.name}.") if inner else [prefix + f.name]
    return names


def section_of(field: dataclasses.Field[Any]) -> Any:
    """The dataclass of a field that is a section of settings; None for a setting."""
    return field.default_factory if dataclasses.is_dataclass(field.default_factory) else None


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where settings were made."""

    path: str | Path | None
    lines: dict[str, int]
    arguments: tuple[str, ...]

    def of(self, name: str) -> str:
        """``run.yaml, line 3`` or ``Flag --steps``."""
        if any(a == f"--{name}" or a.startswith(f"--{name}=") for a in self.arguments):
            return f"Flag --{name}"
        if self.path is None:
            return "Run settings"
        line = self.lines.get(name)
        return f"Run file {self.path}" + (f", line {line}" if line else "")

    def error_of(self, message: str) -> UserError:
        """An error that begins with its place, for a message that names a setting."""
        message = message.removeprefix("Run file: ")
        names = [n for n in re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", message) if n in setting_names()]
        made = [n for n in names if self.of(n).startswith("Flag") or n in self.lines]
        return UserError(f"{self.of((made or names or [''])[0])}: {message}")

    def error_of_type(self, message: str, given: dict[str, Any]) -> UserError:
        """A plain sentence for what jsonargparse says of a value."""
        key = re.search(r'[Kk]ey "([\w.]+)"|^"([\w.]+)":|argument --([\w.]+):', message)
        name = next((g for g in key.groups() if g), "") if key else ""
        if name not in setting_names():
            return UserError(f"{self.of(name)}: {' '.join(message.split())}")
        if "expected one argument" in message:
            return UserError(f"Flag --{name}: has no value; expected {expected(type_of(name))}.")
        found = self._flag(name) or repr(flatten(given).get(name, "a value of another kind"))
        return UserError(f"{self.of(name)}: {name} is {found}; expected {expected(type_of(name))}.")

    def _flag(self, name: str) -> str | None:
        for index, argument in enumerate(self.arguments):
            if argument.startswith(f"--{name}="):
                return repr(argument.partition("=")[2])
            if argument == f"--{name}" and index + 1 < len(self.arguments):
                return repr(self.arguments[index + 1])
        return None


def _check_names(given: dict[str, Any], place: _Places, cls: Any = RunConfig, prefix: str = "") -> None:
    """Raise for the first name that is no setting, and for a section that is no mapping."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key, value in given.items():
        name = f"{prefix}{key}"
        if key not in known:
            raise UserError(f"{place.of(name)}: unknown setting {name!r}.{_hint(name)}")
        section = section_of(known[key])
        if section is not None and not isinstance(value, dict):
            inside = ", ".join(f.name for f in dataclasses.fields(section))
            raise UserError(f"{place.of(name)}: {name} is {value!r}; expected a section with some of {inside}.")
        if section is not None:
            _check_names(value, place, section, f"{name}.")
        elif value is None and not _takes_null(type_of(name)):
            raise UserError(f"{place.of(name)}: {name} is null; expected {expected(type_of(name))}.")


def _check_flags(arguments: Sequence[str], place: _Places) -> None:
    known, sections = setting_names(), {n.rpartition(".")[0] for n in setting_names()}
    expecting = False
    for argument in arguments:
        if argument.startswith("--"):
            name = argument[2:].partition("=")[0]
            if name in sections:
                raise UserError(f"Flag --{name}: is a section; give one of its settings, as --{name}.NAME VALUE.")
            owner = next((k for k in known if name == k or name.startswith(f"{k}.")), None)
            if owner is None and not name.endswith("+"):
                raise UserError(f"Flag --{name}: unknown setting {name!r}.{_hint(name)}")
            expecting = "=" not in argument
        elif not expecting and not argument.startswith("-"):
            raise UserError(f"Run settings: {argument!r} stands alone; expected --SETTING VALUE.")
        else:
            expecting = False


def _hint(name: str) -> str:
    known = setting_names()
    last = name.rpartition(".")[2]
    if last in _ELSEWHERE and _ELSEWHERE[last] in known:
        return f" It is called {_ELSEWHERE[last]!r} here."
    sections = sorted({n.partition(".")[0] for n in known if "." in n})
    head, dot, _ = name.partition(".")
    if not dot and (near := difflib.get_close_matches(head, sections, n=1, cutoff=0.75)):
        return f" Did you mean the section {near[0]!r}?"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or [k for k in known if k.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(last, [k for k in known if k.startswith(f"{head}.")], n=1, cutoff=0.3)
    if near:
        return f" Did you mean {near[0]!r}?"
    inside = [k for k in known if k.startswith(f"{head}.")]
    top = [n for n in known if "." not in n] + [f"{s} (a section)" for s in sections]
    return f" Known are {', '.join(inside or top)}."


def _check_numbers(config: Any, place: _Places, prefix: str = "") -> None:
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if section_of(f):
            _check_numbers(value, place, f"{prefix}{f.name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{prefix}{f.name} is {value}; expected a finite number.")


def type_of(name: str) -> Any:
    """The type of a setting."""
    cls: Any = RunConfig
    *sections, last = name.split(".")
    for section in sections:
        cls = section_of(next(f for f in dataclasses.fields(cls) if f.name == section))
    return get_type_hints(cls)[last]


def _takes_null(kind: Any) -> bool:
    return kind is Any or type(None) in get_args(kind)


def expected(kind: Any) -> str:
    """A type in words."""
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if kind in plain:
        return plain[kind]
    if dataclasses.is_dataclass(kind):
        return f"a mapping with some of {', '.join(f.name for f in dataclasses.fields(kind))}"
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, inside))
    if origin in (Union, types.UnionType):
        return " or ".join(expected(k) for k in inside)
    if origin in (tuple, list, Sequence):
        return f"a list of {expected(inside[0]).removeprefix('a ')} values" if inside else "a list"
    if origin is dict or kind is dict:
        return "a mapping"
    return "anything" if kind is Any else str(kind)
