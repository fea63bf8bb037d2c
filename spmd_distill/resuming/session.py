"""One session of a run: it starts or goes on, and whatever ends it early says how the run goes on."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from spmd_distill.checkpoint import finished_steps, is_of_the_disk, steps_there
from spmd_distill.config import RunConfig, to_dict
from spmd_distill.distributed import all_or_none, from_first, is_first
from spmd_distill.environment import environment
from spmd_distill.errors import UserError
from spmd_distill.guards import Interrupted, StopSignal
from spmd_distill.resuming.halved import recall, remember
from spmd_distill.resuming.settings import Change, changes, check_changes, saved_settings
from spmd_distill.runfolder import RunFolder


@dataclass(frozen=True)
class Session:
    """How a session begins."""

    folder: RunFolder
    stop: StopSignal
    config: RunConfig
    """The settings of this session: those asked for, in the micro-batches that an earlier one found to fit."""
    resume: bool = False
    """Whether it goes on with a run, from its beginning where there is no checkpoint yet."""
    has_checkpoints: bool = False
    """Whether there is anything to restore, be it damaged."""
    changes: tuple[Change, ...] = ()
    """Settings that are not those of the session before."""
    allow_changes: bool = False

    @classmethod
    def begin(cls, config: RunConfig, resume: bool | str, allow_changes: bool) -> "Session":
        """Find or make the folder, and compare the settings; see `spmd_distill.train.distil`."""
        there = from_first("run" if RunFolder(config.run).config.is_file() else "") == "run"
        resume = there if resume == "auto" else bool(resume)
        opening = RunFolder.open if resume else lambda path: RunFolder.create(path, to_dict(config))
        folder = all_or_none(lambda: opening(config.run), first_only=True) or RunFolder(config.run)
        if not resume:
            return cls(folder, StopSignal(), config)
        config = recall(folder, config)
        found = tuple(changes(all_or_none(lambda: saved_settings(folder)), config))
        saved = from_first("saved" if steps_there(folder.checkpoints) else "") == "saved"
        return cls(folder, StopSignal(), config, True, saved, found, allow_changes)

    def describe_machine(self) -> None:
        """Leave in the folder what the run runs on."""
        self.folder.write_json("environment.json", environment())

    def check(self) -> None:
        """Raise `UserError` for changes that make it another training, and are not allowed."""
        if self.has_checkpoints:
            check_changes(self.changes, self.allow_changes, self.folder)

    def halved(self, before: RunConfig, after: RunConfig) -> None:
        """Leave in the folder that the micro-batches were halved, for the next session to begin with them."""
        remember(self.folder, before, after)
        self.folder.write_config(to_dict(after))

    def again(self, config: RunConfig) -> "Session":
        """The session that goes on from the newest checkpoint, in this very process and with these settings."""
        found = tuple(changes(saved_settings(self.folder), config))
        there = bool(steps_there(self.folder.checkpoints))
        return replace(self, config=config, resume=True, has_checkpoints=there, changes=found)

    def note(self, step: int, config: RunConfig) -> None:
        """Leave in the folder that the run went on at ``step``, and with which settings."""
        if not is_first():
            return
        versions = {name: value for name, value in environment().items() if isinstance(value, str)}
        changed = {change.name: [change.old, change.new] for change in self.changes}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.folder.append_json("resumed.jsonl", {"time": now, "step": step, "changes": changed, **versions})
        self.folder.write_config(to_dict(config))


@contextlib.contextmanager
def resumable(folder: RunFolder, fresh: bool) -> Iterator[None]:
    """What ends a session early leaves with how to go on; a run that never did anything leaves nothing.

    Raises:
        Interrupted: with the exit code 0 where the run can go on.
        UserError: in place of an OSError too.
    """
    fresh = fresh and is_first()
    try:
        yield
    except Interrupted as stop:
        if fresh and folder.discard_if_nothing_done():
            raise Interrupted(f"{stop}, before anything was done", stop.code) from None
        raise Interrupted(f"{stop}{_how_to_go_on(folder)}", 0) from None
    except OSError as error:
        cause = f"{error.filename or folder.path}: {error.strerror or error}"
        raise UserError(f"{cause}{_how_to_go_on(folder)}") from error
    except UserError as error:
        if fresh and folder.discard_if_nothing_done():
            raise
        if error.__cause__ is not None and is_of_the_disk(error.__cause__) and finished_steps(folder.checkpoints):
            raise UserError(f"{error}{_how_to_go_on(folder)}") from error.__cause__
        raise
    except BaseException:
        if fresh:
            folder.discard_if_nothing_done()
        raise


def _how_to_go_on(folder: RunFolder) -> str:
    steps, command = finished_steps(folder.checkpoints), f"spmd-distill train --resume {folder.path}"
    if steps:
        return f". Step {steps[-1]} is saved. Go on with: {command}"
    return f", before the first checkpoint. Start it again with: {command}"
