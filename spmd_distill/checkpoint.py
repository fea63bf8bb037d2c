"""Checkpoints that cannot lie: orbax writes them, a sha256 manifest proves them.

Orbax commits a step atomically (it writes ``<step>.orbax-checkpoint-tmp`` and renames the folder), but it
keeps no checksum of the array data: one flipped byte restores as wrong weights without an error, and an
array of another dtype is cast without a word. Both are closed here.

The manifest is written inside the temporary folder, by the background thread that orbax saves with, after
the last byte of every process and before the rename. The rename therefore commits data and manifest
together: wherever a run is killed there are only finished steps, with their manifest, and leftover temporary
folders, which the next run removes. A folder of a step without a manifest (a half-deleted old step, a step
that another program wrote) is not a finished step: it is never restored here, and the log says so.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from spmd_distill.errors import UserError

__all__ = ["Checkpoints"]

_log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_TEMPORARY = ".orbax-checkpoint-tmp"
_STAMPED_AT_COMMIT = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files at the top of a step that orbax touches after the manifest; neither holds a value of the state."""
_HASH_THREADS = 8


class Checkpoints:
    """The checkpoints of one run: ``folder/<step>/{state,meta,manifest.json}``.

    Every process of a run makes one and calls `save`, `wait`, `restore` and `close` at the same places; only
    process 0 deletes, hashes and verifies files. The folder is on a file system that all of them share.

    A save at step k says that the run now stands at k. Steps beyond the point it came from (the step it
    restored, or saved last) are damaged, or of a future that was given up: the next save removes them.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int | None = 3,
        async_: bool = True,
        *,
        read_only: bool = False,
    ):
        """Open ``folder``, make it where needed, and remove what a killed save left in it.

        Args:
            folder: a folder on a mounted file system.
            keep: how many of the newest steps stay; older ones go once a newer one is committed. None: all.
            async_: `save` returns once the state is copied to the host. False: once the step is committed.
            read_only: change nothing in the folder; `save` is then a mistake of the caller.

        Raises:
            UserError: the folder cannot be made or written, is a URL, or ``keep`` is below 1.
        """
        if keep is not None and keep < 1:
            raise UserError(f"checkpoints to keep: found {keep}, expected 1 or more, or null to keep them all")
        if "://" in os.fspath(folder):
            raise UserError(f"checkpoint folder {folder}: found a URL, expected a folder; mount the bucket")
        self.folder = Path(folder).absolute()
        self.bad: dict[int, str] = {}
        """Steps that failed their verification so far, and why."""
        self.restored: int | None = None
        """The step that `restore` returned last."""
        self._async = async_
        self._read_only = read_only
        self._base: int | None = None
        self._saving: tuple[int, int | None] | None = None
        if read_only and not self.folder.is_dir():
            raise UserError(f"checkpoint folder {self.folder}: no such folder; check --run")
        if not read_only and jax.process_index() == 0:
            self._prepare()
        options = ocp.CheckpointManagerOptions(
            create=not read_only,
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._finalise),
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Finished steps, oldest first: committed and with a manifest, which is not verified here."""
        return [step for step in self._on_disk() if (self.folder / str(step) / _MANIFEST).is_file()]

    def latest(self) -> int | None:
        """The newest finished step, or None. `restore` may choose an older one where this one is damaged."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Save a step; a save that is still being written is waited for first.

        Does nothing where the run stands at ``step`` already: that very step was just saved or restored.

        Args:
            step: optimizer steps done.
            state: pytree of jax arrays. On return it is copied to the host, so it may be donated.
            meta: whatever else a resume needs, as JSON. It is copied too.

        Raises:
            UserError: this save, or the one before it, failed for want of space, rights or the like. The
                steps committed earlier are as they were.
        """
        assert not self._read_only, "save on checkpoints opened read-only"
        self.wait()
        if step == self._base:
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            meta=ocp.args.JsonSave(json.loads(json.dumps(dict(meta)))),  # orbax encodes it later, in its thread
        )
        self._saving = (step, self._base)
        limit = step if self._base is None else min(step, self._base + 1)
        try:
            for other in [s for s in self._manager.all_steps() if s >= limit]:
                _log.warning("removing checkpoint %d: the run goes on at step %d", other, step)
                self._manager.delete(other)
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            self._give_up(error)
        self._base = step
        if not self._async:
            self.wait()

    def wait(self) -> None:
        """Block until the step being saved is committed, with its manifest, and old steps are removed.

        Raises:
            UserError: that save failed; as for `save`.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._give_up(error)
        self._saving = None

    def close(self) -> None:
        """Wait, then end orbax's threads. Raises as `wait` does; the threads are ended either way."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def verify(self, step: int) -> str | None:
        """Hash every file of a step against its manifest, several files at a time, on threads of its own.

        Returns:
            None for a good step, else what is wrong with it, in words; also kept in `bad`.
        """
        reason = _verify(self.folder / str(step))
        if reason is None:
            self.bad.pop(step, None)
        else:
            self.bad[step] = reason
        return reason

    def restore(self, step: int | None = None, like: Any = None) -> tuple[Any, dict[str, Any]]:
        """Read a verified step back, on any mesh.

        Args:
            step: which one; None takes the newest that verifies, and logs each damaged one it passes by.
            like: pytree of `jax.ShapeDtypeStruct` with shardings: what to restore and where it is to live.

        Returns:
            The state, in the structure of ``like``, and the meta saved with it. `restored` tells the step.

        Raises:
            UserError: no such step; the step asked for is damaged; no good step at all; or the saved arrays
                are not those of ``like`` (named leaf by leaf, with shape and dtype, found and expected).
        """
        self.wait()
        chosen, complaint = self._choose(step) if jax.process_index() == 0 else (-1, "")
        chosen = _same_everywhere(chosen)
        if chosen < 0:
            raise UserError(complaint or f"checkpoints in {self.folder}: none to restore; see process 0")
        self._compare(chosen, like)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore())
        found = self._manager.restore(chosen, args=items)
        self.restored = self._base = chosen
        return found["state"], found["meta"]

    def _prepare(self) -> None:
        """Make the folder, prove that it can be written, and clear the leftovers of killed saves."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe-{os.getpid()}"
            probe.write_bytes(b"probe")
            probe.unlink()
            for leftover in [path for path in self.folder.iterdir() if _TEMPORARY in path.name]:
                _log.info("removing %s, left by a save that was killed", leftover)
                shutil.rmtree(leftover)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def _finalise(self) -> None:
        """Called by orbax on process 0, in its saving thread: the data is complete, the rename comes next."""
        assert self._saving is not None
        (temporary,) = self.folder.glob(f"{self._saving[0]}{_TEMPORARY}*")
        _write_manifest(temporary)

    def _give_up(self, error: Exception) -> None:
        """After a failed save: forget the step, clear its leftover, and say whose mistake it was."""
        if self._saving is not None:
            step, self._base = self._saving
            self._saving = None
            if jax.process_index() == 0:
                for leftover in self.folder.glob(f"{step}{_TEMPORARY}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            self._manager.reload()  # orbax has already struck out the old steps that it did not delete
        if isinstance(error, OSError) or "os_error_code" in str(error):
            raise _cannot_write(self.folder, error, kept=self.steps()) from error
        raise error

    def _on_disk(self) -> list[int]:
        try:
            return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal() and p.is_dir())
        except FileNotFoundError:
            return []

    def _choose(self, step: int | None) -> tuple[int, str]:
        """The step to restore, or -1 and the complaint."""
        there = self._on_disk()
        if step is not None:
            if step not in there:
                return -1, f"checkpoint {step}: not in {self.folder}; it holds steps {there or 'none'}"
            if reason := self.verify(step):
                advice = "name another step, or none to use the newest good one"
                return -1, f"checkpoint {self.folder / str(step)}: {reason}; {advice}"
            return step, ""
        for candidate in reversed(there):
            reason = self.verify(candidate)
            if reason is None:
                return candidate, ""
            _log.warning("checkpoint %s is bad and passed by: %s", self.folder / str(candidate), reason)
        found = "; ".join(f"{s}: {self.bad[s]}" for s in reversed(there)) or "the folder holds no step"
        return -1, f"checkpoints in {self.folder}: expected a good step to restore, found none ({found})"

    def _compare(self, step: int, like: Any) -> None:
        """Refuse to restore arrays that are not those of ``like``: orbax would cast, or fail obscurely."""
        saved, expected = _describe(self._manager.item_metadata(step)["state"].tree), _describe(like)
        differing = [
            f"{name}: found {saved.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
            for name in sorted(saved.keys() | expected.keys())
            if saved.get(name) != expected.get(name)
        ]
        if differing:
            more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
            shown = "; ".join(differing[:5])
            raise UserError(
                f"checkpoint {self.folder / str(step)} does not fit this run: {shown}{more}. "
                "Use the model, dtype and optimizer settings it was saved with, or start a new run"
            )


def _describe(tree: Any) -> dict[str, str]:
    """Every array of a tree, or of orbax's description of one: ``{"params.layers.w": "float32 [8, 16]"}``."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return {n: f"{np.dtype(x.dtype).name} {list(x.shape)}" for n, (_, x) in zip(names, leaves, strict=True)}


def _same_everywhere(value: int) -> int:
    """Process 0's value, on every process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def _cannot_write(folder: Path, error: Exception, kept: list[int] | None = None) -> UserError:
    inside = re.search(r"os_error_code='(\d+)'", str(error))  # how tensorstore spells an OSError
    number = int(inside[1]) if inside else getattr(error, "errno", None)
    cause = os.strerror(number) if number else str(error)
    intact = "" if kept is None else f" (finished steps {kept or 'none'} are intact)"
    fix = "free some space, or take another folder (--run)"
    return UserError(f"checkpoint folder {folder}: cannot write: {cause}{intact}; {fix}")


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_all(paths: list[Path]) -> list[str]:
    with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="checkpoint-hash") as pool:
        return list(pool.map(_hash, paths))


def _write_manifest(folder: Path) -> None:
    """Hash every file below ``folder`` and write the manifest, flushed to the disk."""
    skip = {folder / name for name in _STAMPED_AT_COMMIT}
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path not in skip)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, _hash_all(paths), strict=True)
    }
    with (folder / _MANIFEST).open("w") as file:
        json.dump({"format": 1, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _verify(folder: Path) -> str | None:
    """What is wrong with a step's folder, or None."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        for name, expected in files.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (size := (folder / name).stat().st_size) != expected["bytes"]:
                return f"{name} has {size} bytes, expected {expected['bytes']}"
        for name, digest in zip(files, _hash_all([folder / name for name in files]), strict=True):
            if digest != files[name]["sha256"]:
                return f"{name} is not what was saved (its sha256 differs)"
    except FileNotFoundError:
        return f"it has no {_MANIFEST}, so it was never finished"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {_MANIFEST} cannot be read ({error})"
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    return None
