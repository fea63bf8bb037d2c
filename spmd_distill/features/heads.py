"""Heads of attention as shards hold them, and how all heads of one layer come together where they must.

A shard has its own heads of all tokens (`head_plan`). A loss that needs heads of several shards at once (their mean,
or relations of channels that a cut goes through) changes over to all heads of its own tokens: then every shard has the
same amount of work, whatever the head counts, and no array of tokens by tokens ever travels.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spmd_distill.collectives import all_gather, axis_index, axis_size
from spmd_distill.models.heads import head_plan

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Heads:
    """Which of ``count`` heads lie where."""

    table: Table
    """[shards, local heads] of head numbers; ``count`` is an empty place, and heads may be on several shards."""
    count: int

    @property
    def cut_evenly(self) -> bool:
        """Every shard has the next heads in order, each once and none twice."""
        return [h for own in self.table for h in own] == list(range(self.count))

    @property
    def places(self) -> np.ndarray:
        """For every head, its first place in a row of all shards' places."""
        flat = [h for own in self.table for h in own]
        return np.asarray([flat.index(h) for h in range(self.count)])

    def gathered(self, x: Float[Array, "B L local C"]) -> Float[Array, "B L count C"]:
        """All heads on every shard; the backward pass adds up gradients, and each shard keeps those of its own."""
        return self.picked(all_gather(x, "model", dim=2))

    def picked(self, x: Float[Array, "B L places C"]) -> Float[Array, "B L count C"]:
        """Every head once, in order, out of all shards' places."""
        return x if self.cut_evenly else jnp.take(x, self.places, axis=2)


def heads_of(tap: str, config: Any) -> Heads:
    """Of ``attention_heads``, ``queries``, ``keys`` or ``values`` of a model with this `DecoderConfig`."""
    plan = head_plan(config.heads, config.kv_heads, axis_size("model"))
    if tap in ("attention_heads", "queries"):
        return Heads(plan.queries, config.heads)
    return Heads(plan.key_values, config.kv_heads)


def of_shard(table: Any) -> jax.Array:
    """This shard's row of a table [shards, ...] of numbers."""
    return jnp.asarray(np.asarray(table))[axis_index("model")]
