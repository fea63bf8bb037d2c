"""YAML and flags to a `RunConfig`, with errors that name the setting."""

import dataclasses
import difflib
import re
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from spmd_distill.config.run import RunConfig
from spmd_distill.errors import UserError


def parse_config(arguments: Sequence[str] = (), path: str | Path | None = None) -> RunConfig:
    """Read a run file and flags (``--optimizer.learning_rate 1e-4``) on top of it; what neither sets has its default.

    Raises `UserError` naming the setting for an unknown one (and the nearest known), a value of a wrong type, a file
    that is missing or not YAML.
    """
    where = "Run settings" if path is None else f"Run file {path}"
    parser = ArgumentParser(exit_on_error=False, prog="spmd-distill", allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(RunConfig, fail_untyped=True)
    given = [] if path is None else ["--config", str(path)]
    try:
        found = vars(parser.instantiate(parser.parse_args([*given, *arguments])))
    except UserError:
        raise
    except (ArgumentError, TypeError, ValueError) as error:
        raise UserError(f"{where}: {_readable(str(error))}") from error
    return RunConfig(**{f.name: found[f.name] for f in dataclasses.fields(RunConfig)})


def setting_names(cls: Any = RunConfig, prefix: str = "") -> list[str]:
    """Every setting by its dotted name."""
    names = []
    for f in dataclasses.fields(cls):
        inner = f.default_factory if dataclasses.is_dataclass(f.default_factory) else None
        names += setting_names(inner, f"{prefix}{f.name}.") if inner else [prefix + f.name]
    return names


def _readable(message: str) -> str:
    """jsonargparse's sentence, with the nearest known name of a setting that does not exist."""
    message = message.replace("Parser key ", "")
    group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    alone = re.search(r"Option '([\w.]+)' is not accepted", message) or re.search(r"arguments: --([\w.]+)", message)
    name = f"{group[1]}.{group[2]}" if group else alone[1] if alone else None
    if name is None:
        return message
    near = difflib.get_close_matches(name, setting_names(), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else f" Known are {', '.join(setting_names())}."
    return f"unknown setting {name!r}.{hint}"
