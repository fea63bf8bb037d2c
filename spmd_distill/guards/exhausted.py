"""What a device's lack of memory looks like, and the change of the settings that needs less."""

from dataclasses import replace

import jax

from spmd_distill.config import RunConfig
from spmd_distill.errors import UserError
from spmd_distill.guards.memory import half_rows, smaller

STATUS = "RESOURCE_EXHAUSTED"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA found no room on a device, while it compiled a program or while it ran one."""
    return isinstance(error, jax.errors.JaxRuntimeError) and STATUS in str(error)


def halved(config: RunConfig, error: BaseException, batch_shards: int) -> RunConfig:
    """The settings for the same steps in micro-batches of half the rows, after ``error``, a device's lack of memory.

    Args:
        config: the settings that were too large.
        error: see `is_out_of_memory`.
        batch_shards: into how many pieces the layout cuts the rows of a micro-batch.

    Raises:
        UserError: the rows cannot be cut further, or ``guards.out_of_memory`` is ``stop``.
    """
    data, half = config.data, half_rows(config, batch_shards)
    if half is not None and config.guards.out_of_memory == "halve":
        return replace(config, data=replace(data, rows=half, micro_batches=2 * data.micro_batches))
    why = (
        "" if half is not None else f", and data.rows is {data.rows} over {batch_shards} batch shard(s): no half of it"
    )
    raise UserError(
        f"A device ran out of memory ({first_line(error)}){why}. {smaller(config, batch_shards)}."
    ) from error


def first_line(error: BaseException) -> str:
    """What XLA says first, without the status; the rest are tables of buffers."""
    line = str(error).partition(STATUS)[2].lstrip(": ").splitlines()
    return (line[0] if line else "").strip().rstrip(".")[:200] or "it does not say how much it wanted"
