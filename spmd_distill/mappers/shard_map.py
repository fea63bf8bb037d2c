"""The main path: `jax.shard_map` over a named mesh, with varying-axes types checked."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from spmd_distill.mappers.base import AbstractMapper, Body, Device
from spmd_distill.sharding import MeshLayout, Specs, named


class ShardMapMapper(AbstractMapper):
    """Every shard on a device of its own; XLA sees one partitioned program."""

    name = "shard_map"

    def __init__(self, layout: MeshLayout, devices: Sequence[Device] | None = None):
        self.mesh = layout.mesh(devices)
        self.layout = layout.resolve(self.mesh.size)

    def map(self, body: Body, in_specs: tuple[Specs, ...], out_specs: Specs) -> Callable[..., Any]:
        """See `AbstractMapper.map`."""
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)

    def shardings(self, specs: Specs) -> Any:
        """See `AbstractMapper.shardings`."""
        return named(self.mesh, specs)

    @property
    def devices(self) -> Sequence[Device]:
        """See `AbstractMapper.devices`."""
        return list(self.mesh.devices.flat)
