"""What several subcommands share."""

from spmd_distill.config import RunConfig
from spmd_distill.runtime import devices_of, prepare_jax

MAPPER_NAMES = ("shard_map", "vmap", "pmap")


def run(config: RunConfig, resume: bool) -> int:
    """Start jax and do a run."""
    prepare_jax(devices_of(config.mesh))
    from spmd_distill.train import distil

    distil(config, resume=resume)
    return 0


def say(text: str) -> None:
    """Tell the user something; what a command computes goes to stdout, this to stderr."""
    from rich.console import Console

    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
