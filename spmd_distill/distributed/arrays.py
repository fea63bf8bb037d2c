"""Arrays of a host onto the devices of all hosts, and back."""

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
