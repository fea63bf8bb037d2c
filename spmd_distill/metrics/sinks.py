"""Where numbers go beside ``metrics.jsonl``: one small interface, TensorBoard and Weights & Biases behind it."""

import abc
import importlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spmd_distill.config import WandbConfig
from spmd_distill.errors import UserError

_FLUSH_SECONDS = 30.0
_log = logging.getLogger(__name__)


class Sink(abc.ABC):
    """Takes what a run measures. What it raises ends the run, so a sink that may fail keeps that to itself."""

    @abc.abstractmethod
    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take numbers by name, such as ``train/loss``, as they were after ``step`` optimizer steps."""

    @abc.abstractmethod
    def text(self, step: int, texts: Mapping[str, str]) -> None:
        """Take texts (Markdown) by name."""

    @abc.abstractmethod
    def close(self) -> None:
        """Write what is left; raises nothing, and once more does nothing."""


class TensorBoard(Sink):
    """A TensorBoard event file, written in the caller's thread.

    tensorboardX's own `SummaryWriter` hands events to a thread by a short queue; where that thread dies of
    a full disk, the run hangs.
    """

    def __init__(self, folder: Path, resume_from: int | None):
        """Begin an event file in ``folder``; what earlier ones hold of steps after ``resume_from`` is taken back."""
        from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2  # two seconds, and no reader needs them
        from tensorboardX.record_writer import RecordWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._tensors: Any = tensor_pb2
        folder.mkdir(exist_ok=True)
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{time.time_ns()}"))
        self._flushed = time.monotonic()
        self._add(file_version="brain.Event:2")
        if resume_from is not None:  # TensorBoard then drops what earlier files hold from this step on
            started = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(step=resume_from + 1, session_log=started)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Sink.write`."""
        values = [self._summaries.Summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items()]
        self._add(step=step, summary=self._summaries.Summary(value=values))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._records.flush()
            self._flushed = time.monotonic()

    def text(self, step: int, texts: Mapping[str, str]) -> None:
        """See `Sink.text`."""
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        shape: Any = self._tensors.TensorProto(dtype="DT_STRING").tensor_shape
        shape.dim.add(size=1)
        values = [
            self._summaries.Summary.Value(
                tag=tag,
                metadata=metadata,
                tensor=self._tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape),
            )
            for tag, text in texts.items()
        ]
        self._add(step=step, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        """See `Sink.close`."""
        try:
            self._records.close()
        except OSError as error:
            _log.warning("the last TensorBoard events were lost: %s", error.strerror or error)

    def _add(self, **fields: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())


def check_wandb(config: WandbConfig) -> None:
    """Raise `UserError` where Weights & Biases is asked for and not installed."""
    if config.project is not None:
        _wandb()


def _wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise UserError(
            "Run file: logging.wandb.project asks for Weights & Biases, but the package wandb cannot be imported "
            f"({error}). Install it with: pip install wandb, or leave the setting out."
        ) from error


class Wandb(Sink):
    """A run of Weights & Biases. Whatever goes wrong there is said once, and the training goes on without it."""

    def __init__(
        self, config: WandbConfig, folder: Path, settings: Mapping[str, Any], resume: bool, say: Callable[[str], None]
    ):
        """Begin a run of ``config.project``, or go on with the one that ``folder/wandb.json`` names.

        Args:
            config: the settings; ``config.project`` is given.
            folder: the run's folder.
            settings: the whole run file, shown beside the curves.
            resume: whether the run is resumed.
            say: told once what went wrong.
        """
        self._say, self._run = say, None
        with self._forgiven("cannot begin"):
            wandb, memory = _wandb(), folder / "wandb.json"
            known = json.loads(memory.read_text())["id"] if resume and memory.exists() else None
            self._run = wandb.init(
                project=config.project, name=config.name or folder.name, mode=config.mode, dir=str(folder),
                config=dict(settings), id=known, resume="allow" if known else None,
            )  # fmt: skip
            memory.write_text(json.dumps({"id": self._run.id, "project": config.project}) + "\n")
            self._run.define_metric("*", step_metric="step")  # steps of a resumed run may come again

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Sink.write`."""
        if self._run is not None:
            with self._forgiven("cannot take numbers"):
                self._run.log({"step": step, **scalars})

    def text(self, step: int, texts: Mapping[str, str]) -> None:
        """See `Sink.text`."""
        if self._run is not None:
            with self._forgiven("cannot take texts"):
                shown = {name: _wandb().Html(f"<pre>{_escaped(text)}</pre>") for name, text in texts.items()}
                self._run.log({"step": step, **shown})

    def close(self) -> None:
        """See `Sink.close`."""
        if self._run is not None:
            with self._forgiven("cannot end"):
                self._run.finish()
            self._run = None

    @contextmanager
    def _forgiven(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._run = None
            self._say(f"Weights & Biases {what} ({type(error).__name__}: {error}); the run goes on without it")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
