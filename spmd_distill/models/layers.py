"""Layers of a decoder in per-shard form: local weights, and collectives only where a block is entered and left."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import einsum
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from spmd_distill.collectives import all_gather, axis_index, copy_to, reduce_from, scatter_to, shard_index
from spmd_distill.models.attention import Scores, Window, attend, attend_cached
from spmd_distill.models.base import Shard, declare
from spmd_distill.models.cache import LayerCache
from spmd_distill.models.heads import HeadPlan, head_plan, own_heads
from spmd_distill.models.rope import Rotation, rotate
from spmd_distill.models.taps import tap

ACTIVATIONS: dict[str, Any] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}
"""What a gated MLP's gate goes through."""


def normalise(x: jax.Array, scale: jax.Array, config: Any) -> jax.Array:
    """Root-mean-square normalisation of the last dimension, in float32 or wider (Zhang and Sennrich, arXiv:1910.07467).

    ``config.norm_offset`` is added to the scale: Gemma stores how far it is from 1.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.norm_eps)
    return (wide * inverse * _scale(scale, wide.dtype, config)).astype(x.dtype)


def _scale(scale: jax.Array, dtype: Any, config: Any) -> jax.Array:
    scale = scale.astype(dtype)
    return scale + config.norm_offset if config.norm_offset else scale


def _ones(config: Any) -> Any:
    return lambda key, shape, dtype: jnp.full(shape, 1 - config.norm_offset, dtype)


class RMSNorm(nnx.Module):
    """Normalisation of hidden states between blocks; see `normalise`."""

    def __init__(self, config: Any, rngs: nnx.Rngs, stack: int | None = None):
        self.config = config
        self.scale = declare(rngs, _ones(config), (config.width,), ("act_embed",), config.param_dtype, stack)

    def __call__(self, x: Float[Array, "B L D"], shard: Shard) -> Float[Array, "B L D"]:
        """Normalise the last dimension."""
        return normalise(x, shard.shared(self.scale[...]), self.config)


class HeadNorm(nnx.Module):
    """Normalisation of queries or keys: of each head by one scale (``head``), or of all heads together (``all``)."""

    def __init__(self, config: Any, count: int, axis: str, rngs: nnx.Rngs, stack: int | None = None):
        self.config, self.count = config, count
        whole = config.qk_norm == "all"
        shape, axes = ((count, config.head_dim), (axis, "head_dim")) if whole else ((config.head_dim,), ("head_dim",))
        self.scale = declare(rngs, _ones(config), shape, axes, config.param_dtype, stack)

    def __call__(self, x: Float[Array, "B L H C"], table: tuple[tuple[int, ...], ...]) -> Float[Array, "B L H C"]:
        """Normalise this shard's heads; ``table`` says which they are (see `HeadPlan`)."""
        if self.config.qk_norm == "head":
            scale: Any = copy_to(self.scale[...], "model")  # whole everywhere, used on a part of the heads
            return normalise(x, scale, self.config)
        scale = own_heads(self.scale[...], table, self.count, 0)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        squares = jnp.sum(jnp.square(wide), axis=-1) * self._once(table, wide.dtype)
        total: Any = reduce_from(jnp.sum(squares, axis=-1), "model")
        total = copy_to(total, "model")
        inverse = jax.lax.rsqrt(total / (self.count * self.config.head_dim) + self.config.norm_eps)
        return (wide * inverse[..., None, None] * _scale(scale, wide.dtype, self.config)).astype(x.dtype)

    def _once(self, table: tuple[tuple[int, ...], ...], dtype: Any) -> jax.Array:
        """For each local head: 1 over the number of places that compute it, so that every head counts once."""
        numbers = np.asarray(table)
        places = np.bincount(numbers.ravel(), minlength=self.count + 1)[numbers]
        share = np.where(numbers < self.count, 1 / places, 0)
        return jnp.asarray(share, dtype)[axis_index("model")]


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions. Column-parallel in, row-parallel out."""

    def __init__(self, config: Any, rngs: nnx.Rngs, stack: int | None = None):
        self.config = config
        init, zeros = nnx.initializers.normal(config.init_std), nnx.initializers.zeros
        d, h, k, c = config.width, config.heads, config.kv_heads, config.head_dim

        def weight(shape: tuple[int, ...], axes: tuple[str, ...], init: Any = init) -> nnx.Param:
            return declare(rngs, init, shape, axes, config.param_dtype, stack)

        self.q = weight((d, h, c), ("embed", "heads", "head_dim"))
        self.k = weight((d, k, c), ("embed", "kv_heads", "head_dim"))
        self.v = weight((d, k, c), ("embed", "kv_heads", "head_dim"))
        self.o = weight((h, c, d), ("heads", "head_dim", "embed"))
        if config.qkv_bias:
            self.q_bias = weight((h, c), ("heads", "head_dim"), zeros)
            self.k_bias = weight((k, c), ("kv_heads", "head_dim"), zeros)
            self.v_bias = weight((k, c), ("kv_heads", "head_dim"), zeros)
        if config.qk_norm != "none":
            self.q_norm = HeadNorm(config, h, "heads", rngs, stack)
            self.k_norm = HeadNorm(config, k, "kv_heads", rngs, stack)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        rotation: Rotation,
        segments: Int[Array, "B L"],
        shard: Shard,
        window: Window = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "B L D"], LayerCache | None]:
        """This shard's heads; the result is a partial sum over ``model``. With a cache, the new one comes too."""
        c = self.config
        plan = head_plan(c.heads, c.kv_heads, shard.tensor_parallel)
        q, k, v = self._project(x, plan)
        q, k = tap("queries", rotate(q, rotation)), tap("keys", rotate(k, rotation))
        tap("values", v)
        scores = Scores(c.attention_scale, c.attention_softcap, c.attention)
        if cache is not None:
            cache = cache.write(k, v)
        if cache is None or cache.fresh:
            out = attend(q, k, v, segments, c.attention_block, scores, window)
        else:
            out = attend_cached(q, cache.k, cache.v, segments, cache.segments, cache.begin, scores, window)
        o = own_heads(self.o[...], plan.queries, c.heads, 0)
        return einsum(tap("attention_heads", out), o, "b l h c, h c d -> b l d"), cache

    def _project(self, x: jax.Array, plan: HeadPlan) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of this shard's heads, ``[B, L, heads, head_dim]``, before rotation."""
        c, found = self.config, []
        for name, table, count in (
            ("q", plan.queries, c.heads),
            ("k", plan.key_values, c.kv_heads),
            ("v", plan.key_values, c.kv_heads),
        ):
            y = einsum(x, own_heads(getattr(self, name)[...], table, count, 1), "b l d, d h c -> b l h c")
            if c.qkv_bias:
                y = y + own_heads(getattr(self, f"{name}_bias")[...], table, count, 0).astype(y.dtype)
            if c.qk_norm != "none" and name != "v":
                y = getattr(self, f"{name}_norm")(y, table)
            found.append(y)
        return found[0], found[1], found[2]


class GatedMLP(nnx.Module):
    """``down(activation(gate x) * up x)`` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: Any, rngs: nnx.Rngs, stack: int | None = None):
        self.activation = config.activation
        init = nnx.initializers.normal(config.init_std)
        d, f = config.width, config.mlp
        self.gate = declare(rngs, init, (d, f), ("embed", "mlp"), config.param_dtype, stack)
        self.up = declare(rngs, init, (d, f), ("embed", "mlp"), config.param_dtype, stack)
        self.down = declare(rngs, init, (f, d), ("mlp", "embed"), config.param_dtype, stack)

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """This shard's neurons; the result is a partial sum over ``model``."""
        neurons = ACTIVATIONS[self.activation](x @ self.gate[...]) * (x @ self.up[...])
        return tap("mlp_neurons", neurons) @ self.down[...]


def embed_tokens(
    table: Float[Array, "V D"], tokens: Int[Array, "B L"], shard: Shard
) -> tuple[Float[Array, "B Llocal D"], Float[Array, "V D"]]:
    """Look tokens up in a table whose rows are spread over the layout's vocabulary axes; the table comes back too.

    Where those include axes of the batch, every shard looks up the tokens of all, and the results are scattered. Use
    the table that comes back as the unembedding of a tied model: the gradients of both uses are then added up in place.
    """
    layout = shard.layout
    for axis in reversed(layout.shared_axes):
        tokens = all_gather(tokens, axis)
    local = tokens - shard_index(layout.vocab_axes) * table.shape[0]
    here = (local >= 0) & (local < table.shape[0])
    rows, table = _look_up(table, jnp.clip(local, 0, table.shape[0] - 1), here)
    rows = rows.astype(shard.dtype)
    for axis in layout.shared_axes:
        rows = scatter_to(rows, axis, 0)
    return shard.leave(rows), table


@jax.custom_vjp
def _look_up(
    table: Float[Array, "V D"], index: Int[Array, "B L"], here: Bool[Array, "B L"]
) -> tuple[Float[Array, "B L D"], Float[Array, "V D"]]:
    """Rows of the table, zero where not ``here``, and the table: one value with one gradient for both of its uses."""
    return jnp.where(here[..., None], table[index], 0), table


def _look_up_fwd(table: jax.Array, index: jax.Array, here: jax.Array) -> Any:
    return _look_up(table, index, here), (index, here)


def _look_up_bwd(saved: Any, cotangents: Any) -> Any:
    index, here = saved
    rows, table = cotangents
    return table.at[index].add(jnp.where(here[..., None], rows, 0).astype(table.dtype)), None, None


_look_up.defvjp(_look_up_fwd, _look_up_bwd)
