"""The oracle: the same body, with the same collectives, on one device by nested `jax.vmap`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from spmd_distill.mappers.base import AbstractMapper, Body, Device
from spmd_distill.mappers.stacking import broadcast_specs, keep_first, stack, stacked_axes, unstack
from spmd_distill.sharding import MeshLayout, Specs, is_spec


class VmapMapper(AbstractMapper):
    """All shards on one device, one batch dimension a mesh axis. Slow, exact, and free of any network."""

    name = "vmap"

    def __init__(self, layout: MeshLayout, devices: Sequence[Device] | None = None):
        self._devices = list(jax.devices() if devices is None else devices)[:1]
        self.layout = layout.resolve(max(layout.device_count, 1))

    def map(self, body: Body, in_specs: tuple[Specs, ...], out_specs: Specs) -> Callable[..., Any]:
        """See `AbstractMapper.map`."""
        layout = self.layout

        def on_global_arrays(*args: Any) -> Any:
            specs = broadcast_specs(in_specs, args)
            stacked = jax.tree.map(lambda spec, x: stack(layout, x, spec), specs, args, is_leaf=is_spec)
            mapped = body
            for axis in reversed(layout.axis_names):  # the first mesh axis outermost
                in_axes = jax.tree.map(
                    lambda spec, axis=axis: 0 if axis in stacked_axes(layout, spec) else None,
                    specs,
                    is_leaf=is_spec,
                )
                mapped = jax.vmap(mapped, in_axes=in_axes, axis_name=axis, axis_size=layout.sizes[axis])
            out = mapped(*stacked)
            return jax.tree.map(
                lambda spec, x: unstack(layout, keep_first(layout, x, spec), spec),
                broadcast_specs(out_specs, out),
                out,
                is_leaf=is_spec,
            )

        return on_global_arrays

    def shardings(self, specs: Specs) -> Any:
        """See `AbstractMapper.shardings`."""
        one = SingleDeviceSharding(self._devices[0])
        return jax.tree.map(lambda _: one, specs, is_leaf=is_spec)

    @property
    def devices(self) -> Sequence[Device]:
        """See `AbstractMapper.devices`."""
        return self._devices
