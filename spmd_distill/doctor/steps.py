"""The checkpoints of a run, every file of every step against its sha256."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from spmd_distill.checkpoint import leftovers, steps_there, verify_step
from spmd_distill.doctor.finding import Finding, size

_NEVER_FINISHED = "never finished"


@dataclass
class Steps:
    """What the checkpoints came to."""

    good: list[int] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)
    bytes: int = 0
    """Of the newest good step."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def newest(self) -> int | None:
        """The newest good step, which a resumed run goes on from."""
        return max(self.good, default=None)


def check_steps(folder: Path, alive: bool = False, say: Callable[[str], None] = lambda message: None) -> Steps:
    """Hash the checkpoints in ``folder``, which a process may be writing to (``alive``)."""
    found = Steps()
    for step in steps_there(folder):
        say(f"hashing checkpoint {step}")
        reason = verify_step(folder / str(step))
        if alive and reason is not None and step not in steps_there(folder):
            continue  # an old one, which the run has deleted meanwhile
        if reason is None:
            found.good.append(step)
        else:
            found.damaged[step] = reason
    found.findings = [*_of_the_folder(folder, found, alive), *_of_steps(found, alive)]
    if found.newest is not None:
        files = [path for path in (folder / str(found.newest)).rglob("*") if path.is_file()]
        found.bytes = sum(path.stat().st_size for path in files)
        found.findings += check_room(folder, found.bytes)
    return found


def _of_the_folder(folder: Path, found: Steps, alive: bool) -> Iterator[Finding]:
    if folder.exists() and not folder.is_dir():
        yield Finding("problem", folder.name, "is a file; expected a folder.", "Move it away.", blocks=True)
    elif not found.good and not found.damaged:
        yield Finding("note", folder.name, "no checkpoint yet.", "" if alive else "A resumed run begins at step 0.")
    for path in leftovers(folder):
        where = f"{folder.name}/{path.name}"
        if alive:
            yield Finding("ok", where, "a step that is being saved.")
        else:
            yield Finding("note", where, "left by a save that was killed.", "Nothing: a resumed run removes it.")


def _of_steps(found: Steps, alive: bool) -> Iterator[Finding]:
    if found.good:
        yield Finding("ok", "checkpoints", f"good by their sha256: {', '.join(map(str, found.good))}.")
    for step, reason in found.damaged.items():
        where, passed = f"checkpoints/{step}", "Nothing: a resumed run passes it by."
        older = found.newest is not None and step < found.newest
        if reason.endswith(f"{_NEVER_FINISHED}") or (older and reason.endswith("is missing")):
            # a kill while an old step was deleted leaves a part of it
            yield Finding("note", where, f"{reason}.", passed)
        else:
            fix = f"Delete it, and check the disk. {passed}" if found.good else "Check the disk."
            yield Finding("problem", where, f"is damaged: {reason}.", fix)
    if found.damaged and not found.good:
        yield Finding(
            "problem",
            "checkpoints",
            "no step is good, so there is none to go on from.",
            "Bring one back from a copy, or delete the folder checkpoints to begin again at step 0.",
            blocks=not alive,
        )


def check_room(folder: Path, step: int) -> Iterator[Finding]:
    """Whether the disk of ``folder`` has room for two more checkpoints of ``step`` bytes."""
    free = shutil.disk_usage(folder).free
    found = f"{size(free)} free, a checkpoint takes {size(step)}."
    if free < 2 * step:
        fix = f"Free {size(2 * step - free)} for two more: a full disk ends the run, and its finished steps stay."
        yield Finding("problem", "disk", found, fix)
    else:
        yield Finding("ok", "disk", found)
