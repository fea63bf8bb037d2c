"""Cutting global arrays into stacked shards and joining them again: what `vmap` and `pmap` need and `shard_map` has.

A stacked array carries the mesh axes of its spec in front, in mesh order, each of its own size:
``[data, model, *local shape]`` for an array cut over both, ``[model, *local shape]`` for one that is whole over data.
"""

import math
from typing import Any

import jax

from spmd_distill.sharding import MeshLayout, Spec, Specs, is_spec, sharded_axes, spec_axes


def broadcast_specs(specs: Specs, tree: Any) -> Any:
    """Spell a prefix tree of specs out to a spec for every leaf of ``tree``."""
    return jax.tree.map(lambda spec, sub: jax.tree.map(lambda _: spec, sub), specs, tree, is_leaf=is_spec)


def stacked_axes(layout: MeshLayout, spec: Spec) -> tuple[str, ...]:
    """The axes in front of a stacked array, in mesh order."""
    return tuple(a for a in layout.axis_names if a in sharded_axes(spec))


def stack(layout: MeshLayout, x: jax.Array, spec: Spec) -> jax.Array:
    """Cut a global array into shards, stacked along leading axes."""
    axes_of_dim = spec_axes(spec, x.ndim)
    shape, order = [], []
    for size, axes in zip(x.shape, axes_of_dim, strict=True):
        cuts = [layout.sizes[a] for a in axes]
        order += [*axes, None]
        shape += [*cuts, size // math.prod(cuts)]
    front = [order.index(a) for a in stacked_axes(layout, spec)]
    local = [i for i, axis in enumerate(order) if axis is None]
    return x.reshape(shape).transpose(front + local)


def unstack(layout: MeshLayout, x: jax.Array, spec: Spec) -> jax.Array:
    """Join a stacked array; inverse of `stack`."""
    front = stacked_axes(layout, spec)
    local_ndim = x.ndim - len(front)
    order, shape = [], []
    for dim, axes in enumerate(spec_axes(spec, local_ndim)):
        order += [*(front.index(a) for a in axes), len(front) + dim]
        shape.append(math.prod(layout.sizes[a] for a in axes) * x.shape[len(front) + dim])
    return x.transpose(order).reshape(shape)


def keep_first(layout: MeshLayout, x: jax.Array, spec: Spec) -> jax.Array:
    """Of an array stacked along ALL mesh axes, keep shard 0 along those that ``spec`` leaves out."""
    keep = sharded_axes(spec)
    index = tuple(slice(None) if a in keep else 0 for a in layout.axis_names)
    return x[index]
