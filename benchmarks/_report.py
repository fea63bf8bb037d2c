"""Rows of a benchmark: one measured figure each, printed as a table or written as JSON.

A row says what was measured, for whom, in which setting, and in which unit; rows of different benchmarks can be put in
one list. A row of ours may carry a bar: the largest value that is good enough. This module does not import jax.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

OURS = "spmd_distill"
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """One figure. ``value`` is None only where nothing could be measured; ``unit`` then says why."""

    benchmark: str
    library: str
    setting: Mapping[str, Any]
    metric: str
    value: float | None
    unit: str
    bar: float | None = None
    holds: bool | None = None

    @classmethod
    def at_most(
        cls, benchmark: str, library: str, setting: Mapping[str, Any], metric: str, value: float, unit: str, bar: float
    ) -> "Row":
        """A row with an upper bar. A value that is not a number holds no bar."""
        return cls(benchmark, library, setting, metric, value, unit, bar, bool(value <= bar))

    @classmethod
    def left_out(cls, benchmark: str, library: str, setting: Mapping[str, Any], reason: str) -> "Row":
        """A row in place of figures that could not be measured here."""
        return cls(benchmark, library, setting, NOT_MEASURED, None, reason)

    def as_json(self) -> dict[str, Any]:
        """The row as JSON writes it; ``bar`` and ``holds`` only where there is a bar."""
        found = {name: getattr(self, name) for name in ("benchmark", "library", "metric", "value", "unit")}
        found["setting"] = dict(self.setting)
        return found | ({"bar": self.bar, "holds": self.holds} if self.bar is not None else {})


def report(rows: Sequence[Row], json_path: str | None = None, title: str = "") -> bool:
    """Print a table, and write JSON to ``json_path``; whether all bars hold. "-" is stdout: the table goes to stderr.

    A setting that all rows share is said once, above the table.
    """
    console = Console(stderr=json_path == "-")
    if not console.is_terminal:  # a table in a log or a file is as wide as its content
        console.width = 160
    console.print(_table(rows, title))
    if json_path == "-":
        json.dump([row.as_json() for row in rows], sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif json_path is not None:
        Path(json_path).write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    missed = [row for row in rows if row.holds is False]
    if any(row.bar is not None for row in rows):
        console.print(f"{len(missed)} of {sum(row.bar is not None for row in rows)} bars missed.")
    return not missed


def _table(rows: Sequence[Row], title: str) -> Table:
    shared = _shared(row.setting for row in rows if row.value is not None)
    table = Table(
        title=title or None,
        title_style="bold",
        caption=_words(shared) or None,
        title_justify="left",
        caption_justify="left",
    )
    for name, justify in (("library", "left"), ("setting", "left"), ("metric", "left"), ("value", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("unit")
    table.add_column("bar", justify="right")
    before = None
    for row in rows:
        own = {k: v for k, v in row.setting.items() if k not in shared}
        named = (row.library, _words(own))
        if named != before and before is not None:
            table.add_section()
        bar = "" if row.bar is None else f"<= {_number(row.bar)} " + ("ok" if row.holds else "MISSED")
        style = "red" if row.holds is False else ""
        value = "-" if row.value is None else _number(row.value)
        said = ("", "") if named == before else named  # once for all its rows
        table.add_row(*map(Text, (*said, row.metric, value, row.unit, bar)), style=style)
        before = named
    return table


def _shared(settings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What all settings agree on; nothing if there is only one, which needs no shortening."""
    settings = list(settings)
    if len(settings) < 2:
        return {}
    return {k: v for k, v in settings[0].items() if all(k in s and s[k] == v for s in settings)}


def _words(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())


def _number(x: float) -> str:
    if isinstance(x, int) or float(x).is_integer():
        return f"{int(x):,}"
    return f"{x:,.1f}" if abs(x) >= 100 else f"{x:.4g}"
