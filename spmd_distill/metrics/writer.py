"""Writing the metrics of a run while it trains: ``metrics.jsonl``, and what else takes them."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from spmd_distill.errors import UserError, cannot_write
from spmd_distill.metrics.reading import FILE, Split, truncate
from spmd_distill.metrics.sinks import Sink, TensorBoard

_OWN_KEYS = ("step", "split", "set", "seconds", "nonfinite")


class MetricWriter:
    """Writes the metrics of one run; of several processes, one is enabled."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        resume_from: int | None = None,
        *,
        enabled: bool = True,
        sinks: Sequence[Sink] = (),
    ):
        """Start, or go on with, the metrics of a run.

        Args:
            folder: the run's folder; it exists.
            resume_from: the step that the run was restored at. Lines of later steps, which the run is about
                to write again, and a last line cut short by a kill are taken away. None: a new run.
            enabled: False touches no file: for all processes but one.
            sinks: take the same numbers; TensorBoard's event file is always there. They are closed with the writer.

        Raises:
            UserError: a new run where there are metrics already, or the folder cannot be written.
        """
        self.folder = Path(folder)
        self._path = self.folder / FILE
        self.enabled, seconds, self._start = enabled, 0.0, time.monotonic()
        if not enabled:
            return
        if resume_from is None and self._path.exists() and self._path.stat().st_size > 0:
            raise UserError(f"{self._path}: found the metrics of an earlier run; take another --run, or resume")
        try:
            if resume_from is not None:
                seconds = truncate(self._path, resume_from)
            self._sinks: list[Sink] = [TensorBoard(self.folder / "tensorboard", resume_from), *sinks]
            self._file = self._path.open("ab", buffering=0)  # nothing is held back that could fail later
        except OSError as error:
            raise cannot_write(self._path, error) from error
        self._start = time.monotonic() - seconds

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seconds(self) -> float:
        """Wall clock since the run began, of earlier sessions too."""
        return time.monotonic() - self._start

    def write(self, step: int, values: Mapping[str, SupportsFloat], prefix: Split) -> None:
        """Write a line, flushed to the file, and hand the numbers to all sinks, named ``prefix/name``.

        Args:
            step: optimizer steps done.
            values: name -> number; an array of one element counts as a number, and is waited for. ``name/set`` is the
                number of one held-out set: every set gets a line of its own, and is ``eval/set/name`` in sinks.
            prefix: ``"train"``, or ``"eval"`` for held-out data.

        Raises:
            UserError: the file cannot be written, for instance because the disk is full.
        """
        assert prefix in ("train", "eval"), prefix
        if not self.enabled:
            return
        lines: dict[str | None, dict[str, float]] = {None: {}}
        for name, value in values.items():
            metric, _, which = name.partition("/")
            lines.setdefault(which or None, {})[metric] = float(value)
        scalars = {
            "/".join(part for part in (prefix, which, name) if part): value
            for which, numbers in lines.items()
            for name, value in numbers.items()
        }
        seconds = round(self.seconds, 3)
        text = "".join(_line(step, prefix, which, seconds, numbers) for which, numbers in lines.items())
        rest = text.encode()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            for sink in self._sinks:
                sink.write(step, scalars)
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def text(self, step: int, texts: Mapping[str, str]) -> None:
        """Hand texts to all sinks. Raises `UserError` as `write` does."""
        if self.enabled:
            try:
                for sink in self._sinks:
                    sink.text(step, texts)
            except OSError as error:
                raise cannot_write(self._path, error) from error

    def close(self) -> None:
        """Close all files, for good; once more does nothing. Raises nothing."""
        if self.enabled:
            self._file.close()
            for sink in self._sinks:
                sink.close()


def _line(step: int, split: Split, which: str | None, seconds: float, numbers: Mapping[str, float]) -> str:
    assert not numbers.keys() & set(_OWN_KEYS), f"metric names {_OWN_KEYS} are taken"
    line: dict[str, Any] = {"step": int(step), "split": split}
    if which is not None:
        line["set"] = which
    line["seconds"] = seconds
    line |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    if odd := {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}:
        line["nonfinite"] = odd
    return json.dumps(line, allow_nan=False) + "\n"
