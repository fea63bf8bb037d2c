"""The compatibility backend: `jax.pmap` over one flat axis of all devices, collectives grouped by an adapter."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd_distill.collectives import FlatAxis, flat_axis
from spmd_distill.mappers.base import AbstractMapper, Body, Device
from spmd_distill.mappers.stacking import broadcast_specs, keep_first, stack, stacked_axes, unstack
from spmd_distill.sharding import MeshLayout, Specs, is_spec, named, over_flat_axis


class PmapMapper(AbstractMapper):
    """Every shard on a device of its own, but `pmap` knows them only as numbers 0 .. n-1.

    Global arrays are cut into one stacked ``[n, *local shape]`` array each, mapped, and joined again, all inside the
    caller's `jit`. Between calls they rest where `ShardMapMapper` keeps them, so checkpoints, export and evaluation do
    not know the difference.
    """

    name = "pmap"

    def __init__(self, layout: MeshLayout, devices: Sequence[Device] | None = None):
        self.mesh = layout.mesh(devices)
        self.layout = layout.resolve(self.mesh.size)
        self.flat = FlatAxis(self.layout.axis_names, tuple(self.layout.sizes.values()))

    def map(self, body: Body, in_specs: tuple[Specs, ...], out_specs: Specs) -> Callable[..., Any]:
        """See `AbstractMapper.map`."""
        layout, n = self.layout, self.layout.device_count
        sizes = tuple(layout.sizes.values())

        def shard(*args: Any) -> Any:
            with flat_axis(self.flat):
                return body(*args)

        mapped = jax.pmap(shard, axis_name=self.flat.name, devices=self.devices)
        if jax.process_count() > 1:
            # Traced inside a jit by one of several processes, `jax.pmap` would take that process' devices only. This is
            # what it is today: `shard_map` over one axis, with nothing checked.
            mapped = over_flat_axis(shard, self.devices, self.flat.name)

        def cut(spec: Any, x: jax.Array) -> jax.Array:
            stacked, front = stack(layout, x, spec), stacked_axes(layout, spec)
            local = stacked.shape[len(front) :]
            lead = tuple(layout.sizes[a] if a in front else 1 for a in layout.axis_names)
            return jnp.broadcast_to(stacked.reshape(lead + local), sizes + local).reshape((n, *local))

        def join(spec: Any, x: jax.Array) -> jax.Array:
            whole = unstack(layout, keep_first(layout, x.reshape(sizes + x.shape[1:]), spec), spec)
            # Left to itself, XLA may cut the result in a way that no NamedSharding over the flat axis can say.
            return jax.lax.with_sharding_constraint(whole, named(self.mesh, spec))

        def on_global_arrays(*args: Any) -> Any:
            stacked = jax.tree.map(cut, broadcast_specs(in_specs, args), args, is_leaf=is_spec)
            out = mapped(*stacked)
            return jax.tree.map(join, broadcast_specs(out_specs, out), out, is_leaf=is_spec)

        assert math.prod(sizes) == n
        return on_global_arrays

    def shardings(self, specs: Specs) -> Any:
        """See `AbstractMapper.shardings`."""
        return named(self.mesh, specs)

    @property
    def devices(self) -> Sequence[Device]:
        """See `AbstractMapper.devices`."""
        return list(self.mesh.devices.flat)
