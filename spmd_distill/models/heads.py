"""Which attention heads a tensor-parallel shard computes, for any head counts on any number of shards.

Where the counts divide, every shard holds its own heads. Where they do not (SmolLM2 has 9 query and 3 key/value heads,
Qwen2.5-0.5B 14 and 2), the weights are stored cut along ``embed``, gathered, and each shard picks heads by a table:
key/value heads are repeated on as many shards as fit, and empty places compute a head of zeros that the output
projection ignores.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from spmd_distill.collectives import axis_index


@dataclass(frozen=True)
class HeadPlan:
    """Tables [shards, local heads] of global head numbers; a number equal to the head count is an empty place.

    Local query head j attends with local key/value head ``j // (local queries / local key/value heads)``.
    """

    queries: tuple[tuple[int, ...], ...]
    key_values: tuple[tuple[int, ...], ...]


@functools.cache
def head_plan(heads: int, kv_heads: int, shards: int) -> HeadPlan:
    """Spread ``heads`` query heads, in groups that share one of ``kv_heads``, over ``shards`` as evenly as can be."""
    group = heads // kv_heads
    if heads % shards == 0:  # queries are stored cut; key/value heads follow them
        local = heads // shards
        queries = np.arange(heads).reshape(shards, local)
        if kv_heads % shards == 0:
            key_values = np.arange(kv_heads).reshape(shards, -1)
        elif group % local == 0:  # all queries of a shard share one key/value head
            key_values = queries[:, :1] // group
        else:  # a shard's queries span groups unevenly: one key/value head each
            key_values = queries // group
    else:
        copies = max(shards // kv_heads, 1)  # shards that work for one key/value head
        places = math.ceil(kv_heads * copies / shards)  # key/value heads a shard has room for
        per_place = math.ceil(group / copies)
        key_values = np.full(shards * places, kv_heads)
        queries = np.full((shards * places, per_place), heads)
        for slot in range(kv_heads * copies):
            kv, part = divmod(slot, copies)
            key_values[slot] = kv
            own = np.arange(part * per_place, min((part + 1) * per_place, group))
            queries[slot, : len(own)] = kv * group + own
        key_values, queries = key_values.reshape(shards, places), queries.reshape(shards, -1)
    return HeadPlan(tuple(map(tuple, queries.tolist())), tuple(map(tuple, key_values.tolist())))


def own_heads(weight: jax.Array, table: tuple[tuple[int, ...], ...], count: int, dim: int) -> jax.Array:
    """This shard's heads along ``dim``, out of a weight that is cut there already (nothing to do) or whole (picked)."""
    shards = len(table)
    if shards == 1 or count % shards == 0:
        return weight
    mine = jnp.asarray(np.asarray(table, np.int32))[axis_index("model")]
    return jnp.take(weight, mine, axis=dim, mode="fill", fill_value=0)
