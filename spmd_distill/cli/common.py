"""What several subcommands share."""

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
    prepare_jax(devices_of(config.mesh))
    end_with_launcher()
    from spmd_distill.guards import leave_at_second_interrupt
    from spmd_distill.train import distil

    with leave_at_second_interrupt(STOPPING):
        distil(config, resume=resume, allow_changes=allow_changes)
    return 0


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
