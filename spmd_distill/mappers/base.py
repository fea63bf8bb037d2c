"""What every mapper does: run a shard body over global arrays."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

from spmd_distill.sharding import MeshLayout, Specs

Device = Any
"""A `jax.Device` (which jax exports as a value, not as a type)."""

Body = Callable[..., Any]
"""What ONE shard does: local arrays in, local arrays out, collectives over the layout's axes by name."""


class AbstractMapper(abc.ABC):
    """Runs shard bodies for one layout. Arrays go in and come out global; specs say how they are cut."""

    name: str
    layout: MeshLayout

    @abc.abstractmethod
    def map(self, body: Body, in_specs: tuple[Specs, ...], out_specs: Specs) -> Callable[..., Any]:
        """Lift ``body`` to global arrays. ``in_specs`` has one entry an argument; trees of specs may be prefixes.

        The result is meant to be called inside `jax.jit`. An output whose spec leaves an axis out must be equal on
        all shards of that axis.
        """

    @abc.abstractmethod
    def shardings(self, specs: Specs) -> Any:
        """A tree of `jax.sharding.Sharding` like ``specs``: where this mapper keeps global arrays between calls."""

    @property
    @abc.abstractmethod
    def devices(self) -> Sequence[Device]:
        """The devices it computes on."""
