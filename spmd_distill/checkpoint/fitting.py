"""Whether the arrays of a step are those of a run, and whose mistake a failed write is."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd_distill.errors import UserError


def check_fit(folder: Path, saved: Any, like: Any) -> None:
    """Refuse arrays that are not those of ``like``: orbax would cast them, or fail obscurely.

    Args:
        folder: of the step, for the message.
        saved: what orbax says of the arrays there.
        like: pytree of `jax.ShapeDtypeStruct`.

    Raises:
        UserError: names the arrays that differ, with type and shape, found and expected.
    """
    found, expected = _describe(saved), _describe(like)
    differing = [
        f"{name}: found {found.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if differing:
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise UserError(
            f"checkpoint {folder} does not fit this run: {'; '.join(differing[:5])}{more}. "
            "Use the model, dtype and optimizer settings it was saved with, or start a new run"
        )


def _describe(tree: Any) -> dict[str, str]:
    """Every array of a tree, or of orbax's description of one: ``{"params.layers.w": "float32 [8, 16]"}``."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return {n: f"{np.dtype(x.dtype).name} {list(x.shape)}" for n, (_, x) in zip(names, leaves, strict=True)}


def is_of_the_disk(error: BaseException) -> bool:
    """Whether it says that something could not be written: full, forbidden, gone."""
    return isinstance(error, OSError) or "os_error_code" in str(error)


def cannot_write(folder: Path, error: BaseException, kept: list[int] | None = None) -> UserError:
    """The sentence for it; ``kept`` are the finished steps, which are as they were."""
    inside = re.search(r"os_error_code='(\d+)'", str(error))  # how tensorstore spells an OSError
    number = int(inside[1]) if inside else getattr(error, "errno", None)
    if kept is not None and (not folder.is_dir() or (number == errno.ENOENT and not kept)):
        return gone(folder)  # or made anew by a save that was under way
    cause = os.strerror(number) if number else str(error)
    intact = "" if kept is None else f" (finished steps {kept or 'none'} are intact)"
    fix = "free some space, or take another folder (--run)"
    return UserError(f"checkpoint folder {folder}: cannot write: {cause}{intact}; {fix}")


def gone(folder: Path) -> UserError:
    """A folder that was there when the run began."""
    return UserError(
        f"checkpoint folder {folder}: is gone, so nothing can be saved; was it moved, deleted or unmounted? "
        "Put it back and resume, or start a new run"
    )
