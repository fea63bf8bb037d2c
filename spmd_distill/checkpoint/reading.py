"""What lies in a folder of checkpoints, read without orbax and without changing anything."""

import json
from pathlib import Path
from typing import Any

from spmd_distill.checkpoint.keeping import MARK, Mark
from spmd_distill.checkpoint.manifest import MANIFEST

TEMPORARY = ".orbax-checkpoint-tmp"
"""In the name of the folder of a step that is being written."""


def steps_there(folder: Path) -> list[int]:
    """All steps that have a folder, finished or not, oldest first."""
    try:
        return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def finished_steps(folder: Path) -> list[int]:
    """Steps that are committed and have a manifest, oldest first; no file is verified here."""
    return [step for step in steps_there(folder) if (folder / str(step) / MANIFEST).is_file()]


def leftovers(folder: Path) -> list[Path]:
    """Folders of saves that were killed."""
    return sorted(path for path in folder.iterdir() if TEMPORARY in path.name) if folder.is_dir() else []


def read_meta(folder: Path, step: int) -> dict[str, Any] | None:
    """The meta that was saved with a step; None where it cannot be read."""
    try:
        found = json.loads((folder / str(step) / "meta" / "metadata").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_mark(folder: Path, step: int) -> Mark | None:
    """By what a step was the best one when it was saved; None where it was not."""
    try:
        found = json.loads((folder / str(step) / MARK).read_text())
        return Mark(str(found["metric"]), float(found["value"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
