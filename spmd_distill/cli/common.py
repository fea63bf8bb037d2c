"""What several subcommands share."""

from pathlib import Path

from spmd_distill.config import RunConfig
from spmd_distill.errors import UserError
from spmd_distill.launcher import end_with_launcher
from spmd_distill.runtime import devices_of, prepare_jax

MAPPER_NAMES = ("shard_map", "vmap", "pmap")


def run(config: RunConfig, resume: bool) -> int:
    """Start jax and do a run."""
    prepare_jax(devices_of(config.mesh))
    end_with_launcher()
    from spmd_distill.train import distil

    distil(config, resume=resume)
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
