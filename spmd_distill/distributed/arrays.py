"""Arrays of a host onto the devices of all hosts, and back."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_PIECE = 2**28
"""Bytes of an array that every device holds whole for a moment, while it is gathered."""


def place(tree: Any, shardings: Any) -> Any:
    """Put host arrays, the same ones on every process, where ``shardings`` say; each process places its own part.

    Unlike `jax.device_put`, which first compares the values over all processes, nothing is sent.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def one(x: Any, sharding: Any) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.block_until_ready(jax.tree.map(one, tree, shardings))


def held_rows(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], devices: Iterable[Any] | None = None
) -> list[int]:
    """Which of the B rows of a batch ``shape [A, B, L]`` some devices hold, those of this process: ascending."""
    places = sharding.devices_indices_map(shape)
    mine = sharding.addressable_devices if devices is None else devices
    return sorted({row for d in mine for row in range(*places[d][1].indices(shape[1]))})


def place_rows(tree: Any, shardings: Any, rows: list[int], count: int) -> Any:
    """`place` for arrays ``[A, len(rows), ...]`` of a process that has no other rows than those its devices hold.

    Args:
        tree: host arrays; those of all processes together make global arrays ``[A, count, ...]``.
        shardings: where these lie.
        rows: what `held_rows` found.
        count: B, the rows of all processes.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def one(x: np.ndarray, sharding: Any) -> jax.Array:
        shape = (x.shape[0], count, *x.shape[2:])
        return jax.make_array_from_callback(shape, sharding, lambda index: part_of(x, rows, count, index))

    return jax.block_until_ready(jax.tree.map(one, tree, shardings))


def part_of(x: np.ndarray, rows: list[int], count: int, index: Any) -> np.ndarray:
    """What lies at ``index`` of the global array ``[A, count, ...]``, from its ``rows`` ``x [A, len(rows), ...]``."""
    first, last, _ = index[1].indices(count)
    start = int(np.searchsorted(rows, first))
    return x[(index[0], slice(start, start + last - first), *index[2:])]


def fetch(tree: Any) -> Any:
    """Global arrays as numpy arrays, whole, on every process.

    What is cut over processes is gathered on the devices in pieces of about `_PIECE` bytes, along a dimension that is
    not cut, where there is one.
    """
    return jax.device_get(tree) if jax.process_count() == 1 else jax.tree.map(_fetch, tree)


def _fetch(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return jax.device_get(x)
    whole = [n if n == local else 1 for n, local in zip(x.shape, x.sharding.shard_shape(x.shape), strict=True)]
    dim = int(np.argmax(whole))
    count = min(-(-x.nbytes // _PIECE), whole[dim])
    if count <= 1:
        return _gathered(x)
    found, size = np.empty(x.shape, x.dtype), -(-x.shape[dim] // count)
    for start in range(0, x.shape[dim], size):
        first = min(start, x.shape[dim] - size)  # all pieces are of one size, so that one program does
        piece = _gathered(jax.lax.dynamic_slice_in_dim(x, np.int32(first), size, dim))
        found[(slice(None),) * dim + (slice(first, first + size),)] = piece
    return found


def _gathered(x: jax.Array) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
