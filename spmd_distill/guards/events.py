"""What the guards of a run did: ``events.jsonl`` in its folder, one JSON object a line.

```text
{"step": 12, "seconds": 40.1, "guard": "skipped", "message": "...", "values": {"loss": null, "in_row": 1}}
```

``step`` counts optimizer steps done, 0 before the first. ``seconds`` is the wall clock since the run began; a resumed
run counts on. ``guard`` is the name under which ``summary.json`` counts it, ``message`` a sentence for people, and
``values`` what it saw: numbers, strings and lists of them; what is no finite number is null. The file only grows: a
run that goes on from a checkpoint writes ``resumed`` with that checkpoint's step, and the events of the steps that it
takes again come again.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_distill.errors import cannot_write

FILE = "events.jsonl"


@dataclass(frozen=True)
class Event:
    """One line of ``events.jsonl``."""

    step: int
    seconds: float
    guard: str
    message: str
    values: dict[str, Any] = field(default_factory=dict)


class Events:
    """Writes the events of one run and counts them by guard. Every process has one; process 0's alone writes."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        note: Callable[[str], None] = lambda message: None,
        *,
        writes: bool = True,
    ):
        """Make the file, or go on with the one that is there.

        Args:
            folder: the run's folder; it exists.
            note: shows a message to people.
            writes: False for all processes but one.

        Raises:
            UserError: the file cannot be written.
        """
        self.path = Path(folder) / FILE
        self.totals: dict[str, int] = {}
        """Guard -> how often it acted in this run; a checkpoint keeps it."""
        self._note, self._writes = note, writes
        self._start = time.monotonic()
        if writes:
            self._append(b"")

    def goes_on(self, step: int, seconds: float, totals: Mapping[str, int]) -> None:
        """Go on with an earlier session's events, from a checkpoint.

        Args:
            step: the checkpoint's.
            seconds: of the run before this session.
            totals: `totals` as the checkpoint kept them.
        """
        self._start = time.monotonic() - seconds
        self.totals = dict(totals)
        message = f"went on from the checkpoint of step {step}"
        self.add(step, "resumed", message, say=False, counts=False)

    def count(self, guard: str) -> int:
        """Count once, without an event; return the new total."""
        self.totals[guard] = self.totals.get(guard, 0) + 1
        return self.totals[guard]

    def add(
        self,
        step: int,
        guard: str,
        message: str,
        values: Mapping[str, Any] | None = None,
        *,
        say: bool = True,
        counts: bool = True,
    ) -> None:
        """Write one event, flushed, and show it.

        Args:
            step: optimizer steps done.
            guard: the name of the guard.
            message: a sentence for people.
            values: what it saw.
            say: False shows nothing.
            counts: False where `count` has counted it, or it is nothing to count.

        Raises:
            UserError: the file cannot be written.
        """
        if counts:
            self.count(guard)
        if say:
            self._note(f"step {step}: {message}" if step else message)
        if not self._writes:
            return
        seconds = round(time.monotonic() - self._start, 3)
        line = {"step": step, "seconds": seconds, "guard": guard, "message": message, "values": _plain(values or {})}
        self._append((json.dumps(line, allow_nan=False) + "\n").encode())

    def _append(self, text: bytes) -> None:
        try:
            with self.path.open("a+b") as file:
                if text and file.tell() and not _ends_with_newline(file):
                    text = b"\n" + text  # a kill cut the last line short
                file.write(text)
        except OSError as error:
            raise cannot_write(self.path, error) from error


def read_events(folder: str | os.PathLike[str]) -> list[Event]:
    """All events of a run, oldest first; none where there is no file. A line cut short by a kill is left out."""
    path = Path(folder) / FILE
    return list(_lines(path)) if path.exists() else []


def _lines(path: Path) -> Iterator[Event]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield Event(**json.loads(line))
            except (ValueError, TypeError):
                continue


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None
