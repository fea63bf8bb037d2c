"""What all processes of a group must know alike: values, mistakes, wishes to stop.

Built on collectives of a few bytes, each waited for before the next begins.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from spmd_distill.errors import UserError

T = TypeVar("T")
_BYTES = 4096
"""Of the longest sentence that one process tells the others."""


def is_first() -> bool:
    """Whether this is process 0, which writes what a run writes."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def any_of(flag: bool) -> bool:
    """Whether ``flag`` is true on any process."""
    return bool(_everyones(np.array([flag], np.uint8)).any())


def from_first(text: str) -> str:
    """The text of process 0, on every process; of its first `_BYTES` bytes."""
    return _everyones_text(text)[0]


def check_same(what: Mapping[str, str], advice: str) -> None:
    """Raise `UserError` on every process where the values under one name differ between processes.

    Args:
        what: The name of a thing, for the message -> anything that says what it is; only a hash of it is sent.
        advice: What mends it.
    """
    mine = np.stack([np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8) for text in what.values()])
    everyones = _everyones(mine)
    for i, name in enumerate(what):
        others = [p for p in range(len(everyones)) if (everyones[p, i] != everyones[0, i]).any()]
        if others:
            shown = ", ".join(map(str, others[:8])) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
            raise UserError(f"Process {shown} of {len(everyones)} has another {name} than process 0. {advice}")


def all_or_none(work: Callable[[], T], *, first_only: bool = False) -> T:
    """Do ``work``; where it is a `UserError` on any process, raise that on all of them.

    ``first_only``: process 0 alone does it, and the others get None. ``work`` must not call a collective, or the
    processes may wait for each other in different places.
    """
    if jax.process_count() == 1:
        return work()
    found: Any = None
    mistake = None
    if not first_only or is_first():
        try:
            found = work()
        except UserError as error:
            mistake = error
    sentences = _everyones_text("" if mistake is None else str(mistake))
    if mistake is not None:
        raise mistake
    for sentence in sentences:
        if sentence:
            raise UserError(sentence)
    return found


def _everyones_text(text: str) -> list[str]:
    coded = text.encode()[:_BYTES]
    mine = np.zeros(_BYTES, np.uint8)
    mine[: len(coded)] = np.frombuffer(coded, np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in _everyones(mine)]


def _everyones(mine: np.ndarray) -> Any:
    """``[processes, *shape]``: the array of each."""
    if jax.process_count() == 1:
        return mine[None]
    return np.asarray(multihost_utils.process_allgather(mine)).reshape(jax.process_count(), *mine.shape)
