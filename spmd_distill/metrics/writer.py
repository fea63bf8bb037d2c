"""Writing the metrics of a run while it trains: ``metrics.jsonl``, and TensorBoard events beside it."""

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from spmd_distill.errors import UserError
from spmd_distill.metrics.reading import FILE, Split, cannot_write, truncate

_FLUSH_SECONDS = 30.0
_log = logging.getLogger(__name__)
_OWN_KEYS = ("step", "split", "seconds", "nonfinite")


class MetricWriter:
    """Writes the metrics of one run; of several processes, one is enabled."""

    def __init__(self, folder: str | os.PathLike[str], resume_from: int | None = None, *, enabled: bool = True):
        """Start, or go on with, the metrics of a run.

        Args:
            folder: the run's folder; it exists.
            resume_from: the step that the run was restored at. Lines of later steps, which the run is about
                to write again, and a last line cut short by a kill are taken away. None: a new run.
            enabled: False touches no file: for all processes but one.

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
            self._board = _Board(self.folder / "tensorboard", resume_from)
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
        """Write one line, flushed to the file, and one TensorBoard scalar a value, named ``prefix/name``.

        Args:
            step: optimizer steps done.
            values: name -> number; an array of one element counts as a number, and is waited for.
            prefix: ``"train"``, or ``"eval"`` for held-out data.

        Raises:
            UserError: the file cannot be written, for instance because the disk is full.
        """
        assert prefix in ("train", "eval"), prefix
        if not self.enabled:
            return
        numbers = {name: float(value) for name, value in values.items()}
        assert not numbers.keys() & set(_OWN_KEYS), f"metric names {_OWN_KEYS} are taken"
        line: dict[str, Any] = {"step": int(step), "split": prefix}
        line["seconds"] = round(self.seconds, 3)
        line |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        if odd := {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}:
            line["nonfinite"] = odd
        rest = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            self._board.write(step, {f"{prefix}/{name}": value for name, value in numbers.items()})
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def close(self) -> None:
        """Close both files, for good; once more does nothing. Raises nothing."""
        if self.enabled:
            self._file.close()
            self._board.close()


class _Board:
    """A TensorBoard event file, written in the caller's thread.

    tensorboardX's own `SummaryWriter` hands events to a thread by a short queue; where that thread dies of
    a full disk, the run hangs.
    """

    def __init__(self, folder: Path, resume_from: int | None):
        from tensorboardX.proto import event_pb2, summary_pb2  # two seconds to import, and no reader needs them
        from tensorboardX.record_writer import RecordWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        folder.mkdir(exist_ok=True)
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{time.time_ns()}"))
        self._flushed = time.monotonic()
        self._add(file_version="brain.Event:2")
        if resume_from is not None:  # TensorBoard then drops what earlier files hold from this step on
            started = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(step=resume_from + 1, session_log=started)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [self._summaries.Summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items()]
        self._add(step=step, summary=self._summaries.Summary(value=values))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._records.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        try:
            self._records.close()
        except OSError as error:
            _log.warning("the last TensorBoard events were lost: %s", error.strerror or error)

    def _add(self, **fields: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
