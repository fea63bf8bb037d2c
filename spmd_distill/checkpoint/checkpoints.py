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

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from spmd_distill.checkpoint import manifest
from spmd_distill.checkpoint.fitting import cannot_write, check_fit, gone, is_of_the_disk
from spmd_distill.checkpoint.held import HeldFolder
from spmd_distill.checkpoint.keeping import Keeping, Mark
from spmd_distill.checkpoint.reading import TEMPORARY, finished_steps, leftovers, read_mark, steps_there
from spmd_distill.errors import UserError

_log = logging.getLogger("spmd_distill.checkpoint")


class _Saving(NamedTuple):
    """The save in progress, and what the run goes back to if it fails."""

    step: int
    mark: Mark | None
    base: int | None
    best: int | None


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
        keep_every: int | None = None,
        best: str | None = None,
        read_only: bool = False,
    ):
        """Open ``folder``, make it where needed, and remove what a killed save left in it.

        Args:
            folder: a folder on a mounted file system.
            keep: how many of the newest steps stay; older ones go once a newer one is committed. None: all.
            keep_every: steps that this number divides stay for good.
            best: the metric of the marks that count: the newest step with one (see `save`) stays too.
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
        self._metric, self._keeping = best, Keeping(keep, keep_every)
        self._base: int | None = None
        self._saving: _Saving | None = None
        if read_only and not self.folder.is_dir():
            raise UserError(f"checkpoint folder {self.folder}: no such folder; check --run")
        if not read_only and jax.process_index() == 0:
            self._prepare()
        options = ocp.CheckpointManagerOptions(
            create=not read_only,
            preservation_policy=self._keeping,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._finalise),
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        self._keeping.best = self._best_until(None)
        self._held = HeldFolder(self.folder)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Finished steps, oldest first: committed and with a manifest, which is not verified here."""
        return finished_steps(self.folder)

    def latest(self) -> int | None:
        """The newest finished step, or None. `restore` may choose an older one where this one is damaged."""
        return max(self.steps(), default=None)

    @property
    def best(self) -> int | None:
        """The best finished step: the newest that was saved with a mark of the run's metric; None: there is none."""
        return self._keeping.best

    def save(self, step: int, state: Any, meta: Mapping[str, Any], mark: Mark | None = None) -> None:
        """Save a step; a save that is still being written is waited for first.

        Only sets the mark where the run stands at ``step`` already: that very step was just saved or restored.

        Args:
            step: optimizer steps done.
            state: pytree of jax arrays. On return it is copied to the host, so it may be donated.
            meta: whatever else a resume needs, as JSON. It is copied too.
            mark: given where this state is the best so far: it stays until a later one is saved with a mark.

        Raises:
            UserError: this save, or the one before it, failed for want of space, rights or the like. The
                steps committed earlier are as they were.
        """
        assert not self._read_only, "save on checkpoints opened read-only"
        self.wait()
        if step == self._base:
            self._mark_again(step, mark)
            return
        self._check_there()
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            meta=ocp.args.JsonSave(json.loads(json.dumps(dict(meta)))),  # orbax encodes it later, in its thread
        )
        self._saving = _Saving(step, mark, self._base, self._keeping.best)
        if mark is not None:
            self._keeping.best = step
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

    def _mark_again(self, step: int, mark: Mark | None) -> None:
        if mark is not None:
            try:
                if jax.process_index() == 0:
                    mark.write(self.folder / str(step))
            except OSError as error:
                raise cannot_write(self.folder, error, kept=self.steps()) from error
            self._keeping.best = step

    def check(self) -> None:
        """Raise as `wait` does if the save in the background has failed by now; does not wait for it."""
        # one process alone must not enter what all of them have to
        if self._saving is not None and jax.process_count() == 1 and not self._manager.is_saving_in_progress():
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
        if self._saving is not None:
            self._saving = None
            self._check_there()  # the step may be in a folder that orbax has made anew

    def close(self) -> None:
        """Wait, then end orbax's threads. Raises as `wait` does; the threads are ended either way."""
        try:
            self.wait()
        except BaseException:
            with contextlib.suppress(Exception):  # what failed, once more, in orbax's words
                self._manager.close()
            raise
        else:
            self._manager.close()
        finally:
            self._held.release()

    def verify(self, step: int) -> str | None:
        """Hash every file of a step against its manifest, several files at a time, on threads of its own.

        Returns:
            None for a good step, else what is wrong with it, in words; also kept in `bad`.
        """
        reason = manifest.verify_step(self.folder / str(step))
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
        found = self._read(chosen, like)
        self.restored = self._base = chosen
        self._keeping.best = self._best_until(chosen)
        return found

    def read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Read a finished step as `restore` does, while the run stays where it is; raises as `restore`."""
        self.wait()
        reason = self.verify(step) if jax.process_index() == 0 else None
        if _same_everywhere(int(reason is not None)):
            raise UserError(f"checkpoint {self.folder / str(step)}: {reason or 'is damaged; see process 0'}")
        return self._read(step, like)

    def _read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        check_fit(self.folder / str(step), self._manager.item_metadata(step)["state"].tree, like)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore())
        found = self._manager.restore(step, args=items)
        return found["state"], found["meta"]

    def _best_until(self, limit: int | None) -> int | None:
        """The newest finished step, up to ``limit``, with a mark of the run's metric, on every process."""
        found = -1
        if jax.process_index() == 0 and self._metric is not None:
            for step in self.steps():
                mark = read_mark(self.folder, step)
                if mark is not None and mark.metric == self._metric and (limit is None or step <= limit):
                    found = step
        return None if (same := _same_everywhere(found)) < 0 else same

    def _prepare(self) -> None:
        """Make the folder, prove that it can be written, and clear the leftovers of killed saves."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe-{os.getpid()}"
            probe.write_bytes(b"probe")
            probe.unlink()
            for leftover in leftovers(self.folder):
                _log.info("removing %s, left by a save that was killed", leftover)
                shutil.rmtree(leftover)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def _finalise(self) -> None:
        """Called by orbax on process 0, in its saving thread: the data is complete, the rename comes next."""
        assert self._saving is not None
        self._check_there()
        (temporary,) = self.folder.glob(f"{self._saving.step}{TEMPORARY}*")
        if self._saving.mark is not None:
            self._saving.mark.write(temporary)
        manifest.write_manifest(temporary)

    def _check_there(self) -> None:
        """Raise `UserError` where the folder was taken away; orbax would make it anew, without the rest of the run."""
        if jax.process_index() == 0 and not self._held.there:
            raise gone(self.folder)

    def _give_up(self, error: Exception) -> None:
        """After a failed save: forget the step, clear its leftover, and say whose mistake it was."""
        saving, self._saving = self._saving, None
        if saving is not None:
            self._base, self._keeping.best = saving.base, saving.best
        if not self._held.there:
            raise gone(self.folder) from error
        if saving is not None:
            if jax.process_index() == 0:
                for leftover in self.folder.glob(f"{saving.step}{TEMPORARY}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            self._manager.reload()  # orbax has already struck out the old steps that it did not delete
        if is_of_the_disk(error):
            raise cannot_write(self.folder, error, kept=self.steps()) from error
        if "does not exist" in str(error) or "NOT_FOUND" in str(error):  # how orbax and tensorstore say it at places
            raise gone(self.folder) from error
        raise error

    def _choose(self, step: int | None) -> tuple[int, str]:
        """The step to restore, or -1 and the complaint."""
        there = steps_there(self.folder)
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


def _same_everywhere(value: int) -> int:
    """Process 0's value, on every process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
