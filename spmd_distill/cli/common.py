"""What several subcommands share."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from spmd_distill.config import RunConfig
from spmd_distill.errors import UserError
from spmd_distill.launcher import end_with_launcher
from spmd_distill.runtime import devices_of, prepare_jax

MAPPER_NAMES = ("shard_map", "vmap", "pmap")
STOPPING = "Stopping as soon as all is saved; Ctrl-C leaves at once."


def run(config: RunConfig, resume: bool | Literal["auto"], allow_changes: bool = False) -> int:
    """Start jax and do a run."""
    with _killed_by_interrupt():
        prepare_jax(devices_of(config.mesh))
        end_with_launcher()
        from spmd_distill.guards import leave_at_second_interrupt
        from spmd_distill.train import distil

    with leave_at_second_interrupt(STOPPING):
        distil(config, resume=resume, allow_changes=allow_changes)
    return 0


@contextlib.contextmanager
def _killed_by_interrupt() -> Iterator[None]:
    """While packages are imported, which takes seconds and does nothing yet, Ctrl-C ends the process at once.

    Many of them run callbacks, where a KeyboardInterrupt is printed and lost.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def say(text: str) -> None:
    """Tell the user something; what a command computes goes to stdout, this to stderr."""
    from rich.console import Console

    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def config_file(run: str) -> Path:
    """The settings of the run in a folder. Raises `UserError` where there is none."""
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise UserError(f"There is no run in {run}: it has no config.yaml. Expected the folder of a run.")
    return path
