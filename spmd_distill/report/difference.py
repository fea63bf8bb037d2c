"""Which settings differ between runs."""

from collections.abc import Sequence
from typing import Any

from spmd_distill.config.source import flatten
from spmd_distill.report.read import Run

ABSENT = "-"


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Each setting that is not the same in all runs (their folders aside), with its value in each of them."""
    flat = [flatten(run.config) for run in runs]
    names = list(dict.fromkeys(name for settings in flat for name in settings if name != "run"))
    rows = [(name, [shown(settings[name]) if name in settings else ABSENT for settings in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def shown(value: Any) -> str:
    """A setting as YAML would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
