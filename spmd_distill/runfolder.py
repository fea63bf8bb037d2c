"""The folder of one run: what lies where in it, and how it is begun, found again and written to."""

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from spmd_distill.errors import UserError, cannot_write

__all__ = ["RunFolder"]

_TRIES = 20
"""How often the lock of a folder is asked for within a second."""


class RunFolder:
    """Holds ``config.yaml metrics.jsonl tensorboard/ curves.png checkpoints/ student/``, and JSON files.

    Process 0 alone creates a folder and writes into it; the other processes of a run name the same path with
    ``RunFolder(path)``, which touches nothing.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Name a folder without looking at it; `create` and `open` look."""
        if "://" in os.fspath(path):
            raise UserError(f"run folder {path}: found a URL, expected a folder; mount the bucket, give its path")
        self.path = Path(path).absolute()

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any]) -> "RunFolder":
        """Make the folder of a new run, with its settings. One that exists must be empty.

        Of several processes that create it at once, one does, and the others find it taken.

        Raises:
            UserError: there is something in the folder (it stays as it is), it is no folder, it cannot be
                made or written, or it is a URL.
        """
        run = cls(path)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            with run._held() as mine:
                names = sorted(entry.name for entry in run.path.iterdir())
                for name in [name for name in names if mine and name.startswith(".config.yaml.")]:
                    (run.path / name).unlink()  # of a start that was killed at once
                    names.remove(name)
                if not names and mine:
                    run.write_config(config)
        except (FileExistsError, NotADirectoryError) as error:
            file = next(above for above in (run.path, *run.path.parents) if above.is_file())
            found = f"found a file at {file}, expected a folder; take --run OTHER"
            raise UserError(f"run folder {run.path}: {found}") from error
        except OSError as error:
            raise cannot_write(run.path, error) from error
        if names:
            shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            fix = "take --run OTHER" + (", or resume the run that is there" if run.config.exists() else "")
            raise UserError(f"run folder {run.path}: expected a new or an empty folder, found {shown}; {fix}")
        if not mine:
            raise run._taken()
        return run

    def discard_if_nothing_done(self) -> bool:
        """Take the folder of a run that did nothing yet away again. False where there is more in it than settings."""
        started = ("config.yaml", "environment.json", "layers.json", "layers.png")
        with contextlib.suppress(OSError):
            if {entry.name for entry in self.path.iterdir()} - {*started, "checkpoints"}:
                return False
            if self.checkpoints.exists():
                self.checkpoints.rmdir()
            for name in started:
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()
        return not self.path.exists()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder, so that no other process on this machine trains in it; a kill lets go of it.

        Whoever holds it first takes away what writes that were killed left there.

        Where the file system has no locks (some network ones), nothing is held.

        Raises:
            UserError: another process holds it.
        """
        with contextlib.ExitStack() as held:
            try:
                mine = held.enter_context(self._held())
            except OSError as error:
                raise cannot_write(self.path, error) from error
            if not mine:
                raise self._taken()
            for draft in self.path.glob(".*.tmp"):
                draft.unlink(missing_ok=True)  # of a write that was killed
            yield

    @contextlib.contextmanager
    def _held(self) -> Iterator[bool]:
        """Hold the lock, or try for a second, in which whoever only looks lets go of it. Yields whether it is held."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            for _ in range(_TRIES):
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(1 / _TRIES)
                    continue
                except OSError:
                    pass  # no locks here
                mine = True
                break
            else:
                mine = False
            yield mine
        finally:
            os.close(handle)

    def _taken(self) -> UserError:
        fix = "wait for it, stop it, or take --run OTHER"
        return UserError(f"run folder {self.path}: another process is training in it; {fix}")

    def in_use(self) -> bool:
        """Whether a process of this machine trains in the folder just now; False where there are no locks.

        The lock is taken for an instant, shared with others that ask.
        """
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass  # no locks here
        finally:
            os.close(handle)
        return False

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "RunFolder":
        """The folder of an earlier run.

        Raises:
            UserError: no such folder, or no ``config.yaml`` in it.
        """
        run = cls(path)
        if not run.path.is_dir():
            found = "a file" if run.path.exists() else "nothing there"
            raise UserError(f"run folder {run.path}: found {found}, expected the folder of a run; check --run")
        if not run.config.is_file():
            raise UserError(f"run folder {run.path}: found no config.yaml, so no run to go on with; check --run")
        return run

    @property
    def config(self) -> Path:
        """The settings the run began with, as YAML."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, one below it a step."""
        return self.path / "checkpoints"

    @property
    def student(self) -> Path:
        """The folder of the trained student in the Hugging Face layout."""
        return self.path / "student"

    @property
    def metrics(self) -> Path:
        """The trace of the run, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def curves(self) -> Path:
        """The picture of the trace."""
        return self.path / "curves.png"

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.yaml``, keys in the order given, whole or not at all; raises as `write_json`."""
        self._replace("config.yaml", yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True))

    def read_config(self) -> dict[str, Any]:
        """What `write_config` wrote.

        Raises:
            UserError: ``config.yaml`` is missing, or it is no YAML mapping.
        """
        try:
            found = yaml.safe_load(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"{self.config}: cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise UserError(f"{self.config}: found {type(found).__name__}, expected a mapping of settings")
        return found

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file of the folder, whole or not at all: a reader never sees a half of it.

        Args:
            name: its name in the folder, such as ``"results.json"``.
            value: plain values, paths, enums, NumPy or JAX scalars, and dicts, lists and tuples of them. NaN
                and infinities, which JSON lacks, become null.

        Raises:
            UserError: the file cannot be written.
        """
        self._replace(name, json.dumps(_plain(value, null_for_nan=True), indent=2, ensure_ascii=False) + "\n")

    def append_json(self, name: str, value: Any) -> None:
        """Add a line to a file of JSON lines; raises as `write_json`."""
        line = json.dumps(_plain(value, null_for_nan=True), ensure_ascii=False) + "\n"
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise cannot_write(self.path / name, error) from error

    def _replace(self, name: str, text: str) -> None:
        target, draft = self.path / name, self.path / f".{name}.{os.getpid()}.tmp"
        try:
            try:
                with draft.open("w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(draft, target)
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(target, error) from error


def _plain(value: Any, where: str = "", null_for_nan: bool = False) -> Any:
    """The value in the types that JSON and YAML share; TypeError, naming the place, for what has none."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        value = np.asarray(value).tolist()
    if isinstance(value, float) and null_for_nan and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        named = ((str(key), f"{where}.{key}".lstrip("."), item) for key, item in value.items())
        return {key: _plain(item, place, null_for_nan) for key, place, item in named}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", null_for_nan) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{where}: {type(value).__name__} has no place in a JSON or YAML file")
