"""Looking inside a decoder: named places of a layer, and what is wanted of the arrays that pass there.

A layer says `tap(name, x)` where ``x`` passes. Nobody who listens is the usual case, and costs nothing: the compiled
program is the same. Who listens says for each name what to make of the array, and of which layers to keep it: the
others are overwritten while the scan over layers goes on.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_distill.collectives import vary_like

TAPS = {
    "block_input": "[B, Llocal, D], the residual stream before a layer; cut along the sequence if the layout says so",
    "block_output": "[B, Llocal, D], the residual stream behind a layer",
    "attention_input": "[B, L, D], behind the norm before attention; all tokens of this shard's rows",
    "attention_heads": "[B, L, local heads, C], what each head returns, before the output projection",
    "attention_output": "[B, Llocal, D], what attention adds to the stream, before dropout",
    "queries": "[B, L, local heads, C], with their rotary positions; which heads are here is in the `HeadPlan`",
    "keys": "[B, L, local key/value heads, C], with their rotary positions",
    "values": "[B, L, local key/value heads, C]",
    "mlp_input": "[B, L, D], behind the norm before the MLP",
    "mlp_neurons": "[B, L, local neurons], gate times up, before the projection down",
    "mlp_output": "[B, Llocal, D], what the MLP adds to the stream, before dropout",
    "final_norm": "[B, Llocal, D], once, behind all layers: what is unembedded",
}
"""Every name, and the array that passes there. Attention maps are no tap, because none is ever whole: losses make them
block by block of queries and keys."""


@dataclass(frozen=True)
class Tap:
    """What is wanted of a place."""

    make: Callable[[jax.Array], Any] = lambda x: x
    """What to keep of an array: itself, itself in another type, a statistic."""
    layers: tuple[int, ...] | None = None
    """Of which layers, ascending; None is all."""


Wanted = Mapping[str, Tap]
"""For each name that is wanted: what of it."""

_listening: ContextVar[tuple[Wanted, dict[str, Any]] | None] = ContextVar("listening", default=None)


@contextlib.contextmanager
def listening(wanted: Wanted) -> Iterator[dict[str, Any]]:
    """Fill the dict it gives while a layer is traced inside the block."""
    assert set(wanted) <= set(TAPS), set(wanted) - set(TAPS)
    found: dict[str, Any] = {}
    token = _listening.set((wanted, found))
    try:
        yield found
    finally:
        _listening.reset(token)


def tap(name: str, x: jax.Array) -> jax.Array:
    """Let whoever listens see ``x``; return it."""
    listener = _listening.get()
    if listener is not None and name in listener[0]:
        listener[1][name] = listener[0][name].make(x)
    return x


class Kept:
    """What a scan over ``depth`` layers carries along of the places that are wanted of some layers only.

    A layer writes into the place of the next layer that is wanted, which then writes over it: one array a wanted layer
    and no more, in a loop that does the same every time. It is written outside of what remat computes again, or every
    layer would save the whole of it.
    """

    def __init__(self, wanted: Wanted, depth: int):
        of_layers = {name: tap.layers for name, tap in wanted.items() if name != "final_norm"}
        self._layers = {name: layers for name, layers in of_layers.items() if layers is not None}
        self._places = {name: _places(layers, depth) for name, layers in self._layers.items()}

    def start(self, seen: Mapping[str, Any], like: Any) -> dict[str, Any]:
        """Empty places for what a layer sees (shapes and types suffice), varying over shards as ``like`` and it do."""

        def empty(layers: Sequence[int], x: Any) -> jax.Array:
            return vary_like(jnp.zeros((len(layers), *x.shape), x.dtype), x, like)

        return {
            name: jax.tree.map(lambda x, layers=layers: empty(layers, x), seen[name])
            for name, layers in self._layers.items()
        }

    def put(self, kept: dict[str, Any], seen: Mapping[str, Any], layer: jax.Array) -> tuple[dict[str, Any], Any]:
        """With what a layer saw in its place, and the rest of what it saw."""
        after = {}
        for name, arrays in kept.items():
            places, is_before_last = self._places[name]
            place = jnp.asarray(places)[layer]

            def write(array: jax.Array, x: jax.Array, place: Any = place, before: Any = is_before_last) -> jax.Array:
                if not before.all():  # the layers behind the last that is wanted change nothing
                    x = jnp.where(jnp.asarray(before)[layer], x, array[place])
                return jax.lax.dynamic_update_index_in_dim(array, x, place, 0)

            after[name] = jax.tree.map(write, arrays, seen[name])
        return after, {name: x for name, x in seen.items() if name not in kept}


def _places(layers: Sequence[int], depth: int) -> tuple[np.ndarray, np.ndarray]:
    """For every layer: its place, and whether a wanted layer comes yet (or is it)."""
    assert layers and list(layers) == sorted(set(layers)) and layers[0] >= 0 and layers[-1] < depth, (layers, depth)
    every = np.arange(depth)
    return np.minimum(np.searchsorted(layers, every), len(layers) - 1).astype(np.int32), every <= layers[-1]
