"""Which settings differ: between runs, or of one run from the defaults."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spmd_distill.config import RunConfig, to_dict
from spmd_distill.config.source import flatten
from spmd_distill.report.read import Run

ABSENT = "-"


@dataclass(frozen=True)
class Setting:
    """A setting that differs."""

    name: str
    """Dotted, as a flag has it."""
    values: list[str]
    """In each run, as YAML would write it; `ABSENT` where the run file says nothing of it."""
    default: str


def differences(runs: Sequence[Run]) -> list[Setting]:
    """Settings that are not the same in all runs; of one run, those that are not the default. Folders are left out."""
    flat = [flatten(run.config) for run in runs]
    usual = {name: shown(value) for name, value in flatten(to_dict(RunConfig())).items()}
    found = []
    for name in dict.fromkeys(name for settings in flat for name in settings if name != "run"):
        values = [shown(settings[name]) if name in settings else ABSENT for settings in flat]
        default = usual.get(name, ABSENT)
        if len(set(values) if len(runs) > 1 else {*values, default}) > 1:
            found.append(Setting(name, values, default))
    return found


def shown(value: Any) -> str:
    """A setting as YAML would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)
