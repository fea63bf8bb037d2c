"""What attention remembers of the tokens before: keys and values of every layer, for generation."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class LayerCache:
    """One layer's keys and values of this shard's heads, in S columns; the next token goes to column ``begin``."""

    k: Float[Array, "B S K C"]
    v: Float[Array, "B S K C"]
    segments: Int[Array, "B S"]
    """0 where a column is padding or not written yet; those of the tokens that are being written are there already."""
    begin: Int[Array, ""]
    fresh: bool = struct.field(pytree_node=False)
    """Nothing was written before: what is written first need not look at the cache."""

    def write(self, k: Float[Array, "B L K C"], v: Float[Array, "B L K C"]) -> "LayerCache":
        """With L tokens more from column ``begin`` on; ``begin`` itself stays, it is moved once a step."""

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), self.begin, 1)

        return LayerCache(put(self.k, k), put(self.v, v), self.segments, self.begin, self.fresh)


@struct.dataclass
class Cache:
    """All layers' keys and values, ``[layers, B, S, K, C]``, as one shard of the mesh holds them."""

    k: Float[Array, "layers B S K C"]
    v: Float[Array, "layers B S K C"]
    segments: Int[Array, "B S"]
    begin: Int[Array, ""]
    """The column that the next token goes to: the same in all rows, which are padded on the left."""
    fresh: bool = struct.field(pytree_node=False)

    def expecting(self, segments: Int[Array, "B L"]) -> "Cache":
        """With the segments of the L tokens that all layers are about to write."""
        put = jax.lax.dynamic_update_slice_in_dim(self.segments, segments, self.begin, 1)
        return Cache(self.k, self.v, put, self.begin, self.fresh)

    def layer(self, k: jax.Array, v: jax.Array) -> LayerCache:
        """The cache of one layer, given its slices."""
        return LayerCache(k, v, self.segments, self.begin, self.fresh)

    def after(self, k: jax.Array, v: jax.Array, count: int) -> "Cache":
        """After all layers wrote ``count`` tokens."""
        return Cache(k, v, self.segments, self.begin + count, fresh=False)


def empty_cache(config: Any, rows: int, columns: int, kv_heads: int, dtype: Any) -> Cache:
    """For ``rows`` of at most ``columns`` tokens; ``kv_heads`` are those that this shard computes."""
    shape = (config.layers, rows, columns, kv_heads, config.head_dim)
    return Cache(
        jnp.zeros(shape, dtype),
        jnp.zeros(shape, dtype),
        jnp.zeros((rows, columns), jnp.int32),
        jnp.int32(0),
        fresh=True,
    )
