"""What generation is compared with: for every token a pass over the whole row, without a cache."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd_distill as sd
from spmd_distill.head.base import logits_of
from spmd_distill.models import Model, Shard
from spmd_distill.sharding import REPLICATED
from spmd_distill.types import Batch

SINGLE = sd.make_mapper("vmap", "single")


def alone(body: Callable[..., Any]) -> Callable[..., Any]:
    """A shard body of three arguments on one device."""
    return SINGLE.map(body, (REPLICATED,) * 3, REPLICATED)


@cache
def one_pass(model: Model) -> Callable[..., jax.Array]:
    def body(params: Any, batch: Batch, last: jax.Array) -> jax.Array:
        out = model.apply(params, batch, Shard(SINGLE.layout, jnp.dtype("float64")))
        hidden = out.hidden.reshape(*batch.tokens.shape, -1)[jnp.arange(len(last)), last]
        return logits_of(out, hidden, 0)[0]

    return jax.jit(alone(body))


def whole(model: Model, params: Any, rows: list[np.ndarray], length: int = 32) -> np.ndarray:
    """Logits ``[rows, V]`` behind the last token of each row, from a pass over the whole row, padded on the right."""
    tokens, segments = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], segments[i, : len(row)] = row, 1
    positions = np.arange(length, dtype=np.int32) * segments
    last = np.array([len(row) - 1 for row in rows])
    return np.asarray(one_pass(model)(params, Batch(tokens, tokens, segments > 0, positions, segments), last))
