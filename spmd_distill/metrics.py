"""What a run measured: ``metrics.jsonl`` and TensorBoard while it trains, a picture and a table at its end.

A line of ``metrics.jsonl`` is one JSON object: ``step`` (optimizer steps done), ``split`` (``"train"`` or
``"eval"``), ``seconds`` (wall clock since the run began; a resumed run counts on), and one key a metric. What
is no finite number is null, and ``nonfinite`` then says what it was: ``{"loss": "nan"}``. Metrics in use:

* ``loss``, the weighted sum, and every term's own value, without its weight, under the term's name: ``forward_kl``;
* ``kl kl_reverse ce_student ce_teacher entropy_student entropy_teacher``, nats a token, with ``perplexity_student``
  and ``perplexity_teacher``, the exponentials of the two CE; ``top1`` and ``acceptance``, fractions of 1;
* ``learning_rate``, and what else a schedule moves: ``forward_kl.weight``, ``forward_kl.temperature``,
  ``skew_kl.skew``, each as it was used in the step;
* ``grad_norm``, ``tokens`` (the valid tokens trained on) and ``tokens_per_second``.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsFloat

from rich.table import Table
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import RecordWriter

from spmd_distill.errors import UserError

__all__ = ["Line", "MetricWriter", "perplexity", "plot_curves", "read_metrics", "results_table"]

Split = Literal["train", "eval"]
_FILE = "metrics.jsonl"
_FLUSH_SECONDS = 30.0
_events: Any = event_pb2
_summaries: Any = summary_pb2
_log = logging.getLogger(__name__)
_OWN_KEYS = ("step", "split", "seconds", "nonfinite")


class Line(NamedTuple):
    """One line of ``metrics.jsonl``, with NaN and infinities back in their places."""

    step: int
    split: Split
    seconds: float
    values: dict[str, float]


class MetricWriter:
    """Writes the metrics of one run. Make one, on process 0 only."""

    def __init__(self, folder: str | os.PathLike[str], resume_from: int | None = None):
        """Start, or go on with, the metrics of a run.

        Args:
            folder: the run's folder; it exists.
            resume_from: the step that the run was restored at. Lines of later steps, which the run is about
                to write again, and a last line cut short by a kill are taken away. None: a new run.

        Raises:
            UserError: a new run where there are metrics already, or the folder cannot be written.
        """
        self.folder = Path(folder)
        self._path = self.folder / _FILE
        seconds = 0.0
        if resume_from is None and self._path.exists() and self._path.stat().st_size > 0:
            raise UserError(f"{self._path}: found the metrics of an earlier run; take another --run, or resume")
        try:
            if resume_from is not None:
                seconds = _truncate(self._path, resume_from)
            self._board = _Board(self.folder / "tensorboard", resume_from)
            self._file = self._path.open("ab", buffering=0)  # nothing is held back that could fail later
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        self._start = time.monotonic() - seconds

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        numbers = {name: float(value) for name, value in values.items()}
        assert not numbers.keys() & set(_OWN_KEYS), f"metric names {_OWN_KEYS} are taken"
        line: dict[str, Any] = {"step": int(step), "split": prefix}
        line["seconds"] = round(time.monotonic() - self._start, 3)
        line |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        if odd := {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}:
            line["nonfinite"] = odd
        rest = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            self._board.write(step, {f"{prefix}/{name}": value for name, value in numbers.items()})
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def close(self) -> None:
        """Close both files, for good; once more does nothing. Raises nothing."""
        self._file.close()
        self._board.close()


class _Board:
    """A TensorBoard event file, written in the caller's thread.

    tensorboardX's own `SummaryWriter` hands events to a thread by a short queue; where that thread dies of
    a full disk, the run hangs.
    """

    def __init__(self, folder: Path, resume_from: int | None):
        folder.mkdir(exist_ok=True)
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{time.time_ns()}"))
        self._flushed = time.monotonic()
        self._add(file_version="brain.Event:2")
        if resume_from is not None:  # TensorBoard then drops what earlier files hold from this step on
            started = _events.SessionLog(status=_events.SessionLog.START)
            self._add(step=resume_from + 1, session_log=started)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [_summaries.Summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items()]
        self._add(step=step, summary=_summaries.Summary(value=values))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._records.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        try:
            self._records.close()
        except OSError as error:
            _log.warning("the last TensorBoard events were lost: %s", error.strerror or error)

    def _add(self, **fields: Any) -> None:
        self._records.write(_events.Event(wall_time=time.time(), **fields).SerializeToString())


def read_metrics(folder: str | os.PathLike[str]) -> list[Line]:
    """All lines of a run's ``metrics.jsonl``, oldest first; none where there is no such file.

    A last line cut short by a kill is left out. Raises UserError where another line is not of this format.
    """
    path = Path(folder) / _FILE
    return [line for line, _ in _lines(path)] if path.exists() else []


def _lines(path: Path) -> Iterator[tuple[Line, str]]:
    """Each whole line, read and as it stands."""
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                return
            try:
                found = json.loads(text)
                odd = found.pop("nonfinite", {})
                step, split, seconds = (found.pop(key) for key in ("step", "split", "seconds"))
                values = {name: float(odd[name] if value is None else value) for name, value in found.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{path}, line {number}: expected a JSON object with step, split and seconds, found "
                    f"{text[:80]!r}; delete the line"
                ) from error
            yield Line(step, split, seconds, values), text


def _truncate(path: Path, step: int) -> float:
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


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot write: {error.strerror or error}; free some space, or take another --run")


def perplexity(cross_entropy: float) -> float:
    """``exp`` of a cross entropy in nats a token; infinite where that overflows."""
    return math.inf if cross_entropy > 700 else math.exp(cross_entropy)


def results_table(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    """The held-out metrics of the student before and after training, side by side.

    Args:
        before, after: metrics by the names above. A missing one shows as a dash; no row where both lack it.
    """
    table = Table(title="Held-out results", title_justify="left")
    table.add_column("")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    teachers = [m["ce_teacher"] for m in (after, before) if "ce_teacher" in m]
    beside = f" (teacher {perplexity(teachers[0]):.2f})" if teachers else ""
    rows = [
        ("KL to the teacher (nats/token)", "kl", lambda x: f"{x:.4f}"),
        ("cross entropy (nats/token)", "ce_student", lambda x: f"{x:.4f}"),
        (f"perplexity{beside}", "ce_student", lambda x: f"{perplexity(x):.2f}"),
        ("top-1 agreement with the teacher", "top1", lambda x: f"{100 * x:.1f} %"),
        ("acceptance rate", "acceptance", lambda x: f"{100 * x:.1f} %"),
    ]
    for title, key, show in rows:
        if key in before or key in after:
            table.add_row(title, *(show(m[key]) if key in m else "-" for m in (before, after)))
    return table


def plot_curves(folder: str | os.PathLike[str]) -> Path:
    """Draw ``curves.png`` from the ``metrics.jsonl`` of a run: a panel for every group of metrics it has.

    Returns:
        The path of the picture.

    Raises:
        UserError: the picture cannot be written.
    """
    from matplotlib.figure import Figure  # half a second to import, and needed once a run

    curves: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    for line in read_metrics(folder):
        for name, value in line.values.items():
            steps, numbers = curves.setdefault((line.split, name), ([], []))
            steps.append(line.step)
            numbers.append(value)
    panels = [p for p in _PANELS if any((split, name) in curves for split in ("train", "eval") for name, *_ in p[2])]
    rows = max(1, math.ceil(len(panels) / 3))
    columns = max(1, math.ceil(len(panels) / rows))
    figure = Figure(figsize=(4.4 * columns, 3.3 * rows), dpi=130, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.1)  # pyright: ignore
    at = [step for steps, _ in curves.values() for step in steps] or [0]
    margin = max(0.04 * (max(at) - min(at)), 0.5)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1, xlim=(min(at) - margin, max(at) + margin))
        _draw(axes, panel, curves)
    if not panels:
        figure.text(0.5, 0.5, "no metrics yet", ha="center", va="center", color="0.4")
    path = Path(folder) / "curves.png"
    try:
        figure.savefig(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


_NATS = "nats per token"
_STUDENT, _TEACHER, _SECOND, _HELD_OUT = "#3465a4", "#7f8c8d", "#3b8f5a", "#d9680f"
_PANELS = [  # title, unit, [(metric, its name in a legend of several, colour)]
    ("Objective", "loss", [("loss", "", _STUDENT)]),
    ("KL to the teacher", _NATS, [("kl", "", _STUDENT)]),
    ("Cross entropy", _NATS, [("ce_student", "student", _STUDENT), ("ce_teacher", "teacher", _TEACHER)]),
    ("Agreement with the teacher", "%", [("top1", "top-1", _STUDENT), ("acceptance", "acceptance", _SECOND)]),
    ("Throughput", "tokens per second", [("tokens_per_second", "", _STUDENT)]),
    ("Gradient before clipping", "global norm", [("grad_norm", "", _STUDENT)]),
]
_MANY = 150
"""More points than this are drawn faintly, with their moving average on top."""


def _draw(axes: Any, panel: Any, curves: Mapping[tuple[str, str], tuple[list[int], list[float]]]) -> None:
    title, unit, metrics = panel
    percent = 100.0 if unit == "%" else 1.0
    for name, called, colour in metrics:
        if ("train", name) in curves:
            steps, values = _arrays(curves["train", name], percent)
            label = f"{called}, train" if called else "train"
            if len(steps) > _MANY:
                axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
                values = _moving_average(values, len(values) // 40)
            axes.plot(
                steps,
                values,
                color=colour,
                linewidth=1.6,
                label=label,
                marker="." if len(steps) < 3 else None,
            )
        if ("eval", name) in curves:
            steps, values = _arrays(curves["eval", name], percent)
            label = f"{called}, held-out" if called else "held-out"
            fill = colour if called else _HELD_OUT
            style = {"markersize": 6, "markeredgecolor": "white", "markeredgewidth": 0.8, "zorder": 3}
            axes.plot(steps, values, "o:", color=fill, linewidth=1.0, label=label, **style)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(fontsize=8, frameon=False)
    if title == "Throughput":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    if title == "Cross entropy":
        right = axes.secondary_yaxis("right")  # the same ticks, read as perplexities
        right.yaxis.set_major_formatter(lambda ce, _: f"{perplexity(ce):.3g}")
        right.set_ylabel("perplexity", fontsize=9)
        right.tick_params(labelsize=8)


def _arrays(curve: tuple[list[int], list[float]], scale: float) -> tuple[Any, Any]:
    import numpy as np

    values = np.asarray(curve[1], dtype=float) * scale
    return np.asarray(curve[0]), np.where(np.isfinite(values), values, np.nan)


def _moving_average(values: Any, width: int) -> Any:
    """Centred mean over ``width`` points; a NaN stays where it is and spoils no neighbour."""
    import numpy as np

    good = np.isfinite(values)
    window = np.ones(max(width, 1))
    total = np.convolve(np.where(good, values, 0.0), window, "same")
    return np.where(good, total / np.maximum(np.convolve(good, window, "same"), 1), np.nan)
