"""``metrics.jsonl`` as it is read back, cut back for a resumed run, and complained about."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from spmd_distill.errors import UserError

FILE = "metrics.jsonl"
Split = Literal["train", "eval"]


class Line(NamedTuple):
    """One line of ``metrics.jsonl``, with NaN and infinities back in their places."""

    step: int
    split: Split
    seconds: float
    values: dict[str, float]
    set: str | None = None
    """Which held-out set it is about; None: all of them together."""


def parse_line(text: str) -> Line:
    """One line of ``metrics.jsonl``. Raises ValueError, with what was expected and found, where it is none."""
    try:
        found = json.loads(text)
        odd = found.pop("nonfinite", {})
        step, split, seconds = (found.pop(key) for key in ("step", "split", "seconds"))
        which = found.pop("set", None)
        values = {name: float(odd[name] if value is None else value) for name, value in found.items()}
        if type(step) is not int:
            raise TypeError("step")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected a JSON object with step, split and seconds, found {text[:80]!r}") from error
    return Line(step, split, seconds, values, which)


def read_metrics(folder: str | os.PathLike[str]) -> list[Line]:
    """All lines of a run's ``metrics.jsonl``, oldest first; none where there is no such file.

    A last line cut short by a kill is left out. Raises UserError where another line is not of this format.
    """
    path = Path(folder) / FILE
    return [line for line, _ in _lines(path)] if path.exists() else []


def _lines(path: Path) -> Iterator[tuple[Line, str]]:
    """Each whole line, read and as it stands."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                text = line.decode("utf-8")
                yield parse_line(text), text
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {error}; delete the line") from error


def truncate(path: Path, step: int) -> float:
    """Take away what was written after ``step``. Returns the seconds of the last line that stays, or 0."""
    if not path.exists():
        return 0.0
    seconds, draft = 0.0, path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8") as file:
        for line, text in _lines(path):
            if line.step <= step:
                file.write(text)
                seconds = max(seconds, line.seconds)
    os.replace(draft, path)
    return seconds
