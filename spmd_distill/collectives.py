"""Every collective of the library, meaning the same under `jax.shard_map`, nested `jax.vmap` and `jax.pmap`.

A shard body names mesh axes (``"data"``, ``"model"``, ``"replica"``) and calls the functions of this module; it never
calls a `lax` collective itself. Two things make that necessary:

* `psum` is transposed differently by `shard_map` with varying-axes types (to a broadcast) and by `vmap` and `pmap` (to
  another `psum`). So inside anything that is differentiated, shard bodies use the pairs below, whose backward pass is
  spelled out: `copy_to` / `reduce_from` (the f and g of Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053, section 3)
  and `gather_from` / `scatter_to` (their sequence-parallel form, Korthikanti et al. 2022, arXiv:2205.05198, section
  4.2.2).
* `pmap` knows one flat axis. `flat_axis` puts an adapter in place that turns a named axis into groups of its devices.

Axes are given as one name or a tuple of names. Over an axis with one shard nothing happens and nothing varies (a
layout's specs leave such an axis out): XLA would copy what it "reduces" there. Collectives that move slices
(`all_gather`, `psum_scatter`) take one axis: over several they are not defined under nested `vmap`.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Axes = str | tuple[str, ...]
T = TypeVar("T")


def _names(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _shared(axes: Axes) -> tuple[str, ...]:
    """Those of ``axes`` that have more than one shard."""
    return tuple(a for a in _names(axes) if axis_size(a) > 1)


# ---------------------------------------------------------------------------------------------------------------------
# The adapter for one flat axis (pmap)


@dataclass(frozen=True)
class FlatAxis:
    """One axis of ``prod(sizes)`` devices that stands for a grid of named axes, in row-major order."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """The flat axis' own name. It spells the grid, so that two grids never share a cached trace."""
        return "flat:" + ",".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True))

    def groups(self, axes: tuple[str, ...]) -> list[list[int]] | None:
        """Devices that differ only in their coordinates along ``axes``; None for all of them."""
        if set(axes) >= {a for a, n in zip(self.axes, self.sizes, strict=True) if n > 1}:
            return None
        grid = np.arange(math.prod(self.sizes)).reshape(self.sizes)
        moved = [self.axes.index(a) for a in axes]
        kept = [i for i in range(len(self.axes)) if i not in moved]
        return grid.transpose(kept + moved).reshape(-1, math.prod(self.sizes[i] for i in moved)).tolist()

    def index(self, axis: str) -> jax.Array:
        """This device's coordinate along ``axis``."""
        i = self.axes.index(axis)
        return lax.axis_index(self.name) // math.prod(self.sizes[i + 1 :]) % self.sizes[i]


_flat: ContextVar[FlatAxis | None] = ContextVar("flat_axis", default=None)


@contextlib.contextmanager
def flat_axis(flat: FlatAxis) -> Iterator[None]:
    """While a body is traced under `pmap`, every named axis means a group of ``flat``'s devices."""
    token = _flat.set(flat)
    try:
        yield
    finally:
        _flat.reset(token)


def _where(axes: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """The axis argument and the group keyword of a `lax` collective over ``axes`` under the present mapper."""
    flat = _flat.get()
    if flat is None:
        return (axes[0] if len(axes) == 1 else axes), {}
    return flat.name, {"axis_index_groups": flat.groups(axes)}


# ---------------------------------------------------------------------------------------------------------------------
# Plain collectives: use them on what is not differentiated


def psum(x: T, axes: Axes) -> T:
    """Sum over the shards of ``axes``; a pytree of arrays of any shape. Not for differentiated code: `reduce_from`."""
    names = _shared(axes)
    if not names:
        return x
    where, groups = _where(names)
    return lax.psum(x, where, **groups)


def pmax(x: T, axes: Axes) -> T:
    """Elementwise maximum over the shards of ``axes``. It has no gradient: stop it first."""
    names = _shared(axes)
    if not names:
        return x
    where, groups = _where(names)
    return lax.pmax(x, where, **groups)


def axis_index(axis: str) -> jax.Array:
    """This shard's coordinate along ``axis``, an int32 scalar."""
    if not _shared(axis):
        return jnp.int32(0)
    flat = _flat.get()
    return lax.axis_index(axis) if flat is None else flat.index(axis)


def axis_size(axes: Axes) -> int:
    """How many shards lie along ``axes`` (a Python int)."""
    flat = _flat.get()
    sizes = [lax.axis_size(a) if flat is None else flat.sizes[flat.axes.index(a)] for a in _names(axes)]
    return math.prod(sizes)


def shard_index(axes: Axes) -> jax.Array:
    """Row-major rank of this shard among the shards of ``axes``, an int32 scalar."""
    index = jnp.int32(0)
    for axis in _names(axes):
        index = index * axis_size(axis) + axis_index(axis)
    return index


def all_gather(x: jax.Array, axis: str, *, dim: int = 0, tiled: bool = True) -> jax.Array:
    """Concatenate (``tiled``) or stack the shards' arrays along ``dim``; the transpose is `psum_scatter` everywhere."""
    if not _shared(axis):
        return x if tiled else jnp.expand_dims(x, dim)
    where, groups = _where((axis,))
    return lax.all_gather(x, where, axis=dim, tiled=tiled, **groups)


def psum_scatter(x: jax.Array, axis: str, *, dim: int = 0) -> jax.Array:
    """Sum over the shards, each keeping its own slice of ``dim``."""
    if not _shared(axis):
        return x
    where, groups = _where((axis,))
    return lax.psum_scatter(x, where, scatter_dimension=dim, tiled=True, **groups)


def all_to_all(x: jax.Array, axis: str, *, split: int, concat: int) -> jax.Array:
    """Give every shard its slice of ``split``, and concatenate the slices received along ``concat``."""
    if not _shared(axis):
        return x
    where, groups = _where((axis,))
    return lax.all_to_all(x, where, split, concat, tiled=True, **groups)


def gather_stacked(x: T, axes: Axes) -> T:
    """Stack the shards' arrays (of any pytree) along a new first dimension, the first axis outermost."""

    def one(leaf: jax.Array) -> jax.Array:
        for axis in reversed(_names(axes)):
            leaf = all_gather(leaf, axis, tiled=False)
        return leaf.reshape(-1, *leaf.shape[len(_names(axes)) :])

    return jax.tree.map(one, x)


# ---------------------------------------------------------------------------------------------------------------------
# Types of shard_map: which axes a value differs over


def to_varying(x: T, axes: Axes) -> T:
    """Mark a value (any pytree) as possibly different on every shard of ``axes``.

    Only `shard_map` keeps such types; under the other mappers, and where the mark is already there, nothing happens.
    A parameter marked over the batch axes has per-shard gradients, which the step then sums once.
    """

    def mark(leaf: Any) -> Any:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if not manual:  # plain vmap or jit
            return leaf
        have = jax.typeof(leaf).manual_axis_type.varying
        need = tuple(a for a in _names(axes) if a in manual and a not in have and lax.axis_size(a) > 1)
        return lax.pcast(leaf, need, to="varying") if need else leaf

    return jax.tree.map(mark, x)


def vary_like(x: T, *others: Any) -> T:
    """Mark ``x`` as varying over every axis that any leaf of ``others`` varies over: what a loop's carry needs."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return x
    axes: set[str] = set()
    for leaf in jax.tree.leaves(others):
        axes |= set(jax.typeof(leaf).manual_axis_type.varying)
    return to_varying(x, tuple(sorted(axes)))


# ---------------------------------------------------------------------------------------------------------------------
# Differentiable pairs


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_to(x: jax.Array, axes: Axes) -> jax.Array:
    """Forward: the value every shard of ``axes`` already holds. Backward: the sum of the shards' gradients."""
    return to_varying(x, axes)


def _copy_to_bwd(axes: Axes, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (psum(g, axes),)


copy_to.defvjp(lambda x, axes: (to_varying(x, axes), None), _copy_to_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reduce_from(x: jax.Array, axes: Axes) -> jax.Array:
    """Forward: the sum over the shards of ``axes``. Backward: the gradient as it is."""
    return psum(x, axes)


def _reduce_from_bwd(axes: Axes, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (to_varying(g, axes),)


reduce_from.defvjp(lambda x, axes: (psum(x, axes), None), _reduce_from_bwd)


def gather_from(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Forward: the shards' slices of ``dim`` concatenated. Backward: gradients summed, each shard keeping its slice.

    The entry of a tensor-parallel block whose input is sharded along the sequence; also the gathering of a parameter
    that is stored sharded (FSDP), where the backward pass is the reduce-scatter of its gradient.
    """
    return all_gather(x, axis, dim=dim)


def scatter_to(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Forward: the sum over the shards, each keeping its slice of ``dim``. Backward: the slices concatenated."""
    return psum_scatter(x, axis, dim=dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_param(x: jax.Array, axes: Axes, dim: int, dtype: Any) -> jax.Array:
    """`gather_from` of ``x.astype(dtype)``: the cast travels in ``dtype``, the gradient is summed in ``x``'s own type.

    A bfloat16 copy of a float32 parameter is gathered (half the bytes) while its gradient loses nothing in the sum.
    Several axes are those of a spec: the first cuts ``dim`` into the coarsest pieces.
    """
    x = x.astype(dtype)
    for axis in reversed(_names(axes)):
        x = all_gather(x, axis, dim=dim)
    return x


def _gather_param_fwd(x: jax.Array, axes: Axes, dim: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return gather_param(x, axes, dim, dtype), jnp.zeros((), x.dtype)  # the scalar only carries the stored type


def _gather_param_bwd(axes: Axes, dim: int, dtype: Any, like: jax.Array | np.ndarray, g: jax.Array) -> tuple[jax.Array]:
    g = g.astype(like.dtype)
    for axis in _names(axes):
        g = psum_scatter(g, axis, dim=dim)
    return (g,)


gather_param.defvjp(_gather_param_fwd, _gather_param_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def collect_from(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Forward: the shards' slices of ``dim`` concatenated, the same value on every shard. Backward: the own slice.

    For code that then computes the same thing on every shard (the reference head): each shard's gradient is already
    whole, so it is cut and not summed. Written as a psum of disjoint slices because `shard_map` then knows the
    result to be equal on all shards, in every supported JAX version.
    """
    if not _shared(axis):
        return x
    size = x.shape[dim]
    whole = jnp.zeros((*x.shape[:dim], size * axis_size(axis), *x.shape[dim + 1 :]), x.dtype)
    mine = lax.dynamic_update_slice_in_dim(vary_like(to_varying(whole, axis), x), x, axis_index(axis) * size, dim)
    return psum(mine, axis)


def _collect_from_bwd(axis: str, dim: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    size = g.shape[dim] // axis_size(axis)
    g = to_varying(g, axis)
    return (lax.dynamic_slice_in_dim(g, axis_index(axis) * size, size, dim),)


collect_from.defvjp(lambda x, axis, dim: (collect_from(x, axis, dim), None), _collect_from_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def split_to(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Forward: this shard's slice of ``dim`` of what all shards hold. Backward: the slices' gradients concatenated.

    For work that shards of ``axis`` share instead of each doing all of it. The transpose of `collect_from`.
    """
    if not _shared(axis):
        return x
    size = x.shape[dim] // axis_size(axis)
    return lax.dynamic_slice_in_dim(to_varying(x, axis), axis_index(axis) * size, size, dim)


split_to.defvjp(
    lambda x, axis, dim: (split_to(x, axis, dim), None), lambda axis, dim, _, g: (collect_from(g, axis, dim),)
)


def same_on(x: jax.Array, axes: Axes) -> jax.Array:
    """Tell `shard_map` that a value, equal on every shard of ``axes`` though computed from varying ones, is equal.

    Keeps shard 0's copy: exact, unlike a mean. Not for differentiated code.
    """
    names = _shared(axes)
    return psum(jnp.where(shard_index(names) == 0, x, jnp.zeros_like(x)), names) if names else x
