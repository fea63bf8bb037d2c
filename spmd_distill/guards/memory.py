"""A training step that would not fit is refused before anything is placed, with a change that makes it smaller."""

from collections.abc import Sequence
from typing import Any

from spmd_distill.config import RunConfig
from spmd_distill.errors import UserError

GIB = 2**30


def device_bytes(config: RunConfig, devices: Sequence[Any]) -> int | None:
    """What a device has: as the run file says, else as the device itself does; None where it does not (a CPU)."""
    if config.guards.device_memory_gib is not None:
        return round(config.guards.device_memory_gib * GIB)
    found = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((n for n in found if n), default=None)


def check_memory(config: RunConfig, needed: int | None, devices: Sequence[Any], batch_shards: int) -> None:
    """Raise `UserError` where a step needs more than ``guards.memory`` of a device.

    Args:
        config: the run's settings.
        needed: bytes of a device that the compiled step takes, arguments included (`program.Memory.total`); None where
            the backend does not say.
        devices: those of the mesh that this process has.
        batch_shards: into how many pieces the layout cuts the rows of a micro-batch.
    """
    share, there = config.guards.memory, device_bytes(config, devices)
    if share is None or needed is None or there is None or needed <= share * there:
        return
    raise UserError(
        f"The training step needs {needed / GIB:.3g} GiB of a device that has {there / GIB:.3g} GiB: "
        f"{100 * needed / there:.0f} %, over the {100 * share:.0f} % of guards.memory. Nothing was placed yet. "
        f"{smaller(config, batch_shards)}. guards.memory: null tries all the same."
    )


def smaller(config: RunConfig, batch_shards: int) -> str:
    """The change that costs least and needs less: the same gradient in smaller pieces, then less kept for backward."""
    half, twice = half_rows(config, batch_shards), 2 * config.data.micro_batches
    if half is not None:
        return f"Try --data.rows {half} --data.micro_batches {twice}: the same gradient in smaller pieces"
    if config.student.remat in ("none", "dots", "sums"):
        return "Try --student.remat full: less is kept for the backward pass"
    return "Try a layout that cuts the parameters over more devices, such as --mesh fsdp, or shorter rows"


def half_rows(config: RunConfig, batch_shards: int) -> int | None:
    """Half of ``data.rows``, where the layout can still spread it evenly over its batch shards."""
    half, rest = divmod(config.data.rows, 2)
    return half if rest == 0 and half >= batch_shards and half % batch_shards == 0 else None
