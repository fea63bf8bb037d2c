"""Three ways to run one shard body over global arrays, with the same result."""

from collections.abc import Sequence

from spmd_distill.errors import UserError
from spmd_distill.mappers.base import AbstractMapper as AbstractMapper
from spmd_distill.mappers.base import Body as Body
from spmd_distill.mappers.base import Device as Device
from spmd_distill.mappers.pmap import PmapMapper
from spmd_distill.mappers.shard_map import ShardMapMapper
from spmd_distill.mappers.vmap import VmapMapper
from spmd_distill.sharding import MeshLayout

__all__ = ["PmapMapper", "ShardMapMapper", "VmapMapper"]

MAPPERS: dict[str, type[AbstractMapper]] = {m.name: m for m in (ShardMapMapper, VmapMapper, PmapMapper)}
"""Mapper by the name that run files and flags use."""


def make_mapper(name: str, layout: MeshLayout | str, devices: Sequence[Device] | None = None) -> AbstractMapper:
    """Build the mapper called ``name`` over a layout, or over the layout of that name or path.

    Raises `UserError` for an unknown mapper and for a layout that does not exist or does not fit the devices.
    """
    if name not in MAPPERS:
        raise UserError(f"Unknown mapper {name!r}; expected one of {', '.join(MAPPERS)}.")
    layout = MeshLayout.load(layout) if isinstance(layout, str) else layout
    return MAPPERS[name](layout, devices)  # type: ignore[call-arg]
