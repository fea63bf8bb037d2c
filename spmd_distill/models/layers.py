"""Layers of a decoder in per-shard form: local weights, and collectives only where a block is entered and left."""

from typing import Any

import jax
import jax.numpy as jnp
from einops import einsum
from flax import nnx
from jaxtyping import Array, Float, Int

from spmd_distill.collectives import all_gather, scatter_to, shard_index
from spmd_distill.models.attention import attend
from spmd_distill.models.base import Shard, declare
from spmd_distill.models.heads import head_plan, own_heads


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation, in float32 or wider (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, config: Any, rngs: nnx.Rngs, stack: int | None = None):
        self.eps = config.norm_eps
        ones = lambda key, shape, dtype: jnp.ones(shape, dtype)  # noqa: E731
        self.scale = declare(rngs, ones, (config.width,), ("act_embed",), config.param_dtype, stack)

    def __call__(self, x: Float[Array, "B L D"], shard: Shard) -> Float[Array, "B L D"]:
        """Normalise the last dimension."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * inverse * shard.shared(self.scale[...]).astype(wide.dtype)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions. Column-parallel in, row-parallel out."""

    def __init__(self, config: Any, rngs: nnx.Rngs, stack: int | None = None):
        self.config = config
        init = nnx.initializers.normal(config.init_std)
        d, h, k, c = config.width, config.heads, config.kv_heads, config.head_dim

        def weight(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
            return declare(rngs, init, shape, axes, config.param_dtype, stack)

        self.q = weight((d, h, c), ("embed", "heads", "head_dim"))
        self.k = weight((d, k, c), ("embed", "kv_heads", "head_dim"))
        self.v = weight((d, k, c), ("embed", "kv_heads", "head_dim"))
        self.o = weight((h, c, d), ("heads", "head_dim", "embed"))

    def __call__(
        self,
        x: Float[Array, "B L D"],
        rotation: tuple[Float[Array, "B L 1 half"], Float[Array, "B L 1 half"]],
        segments: Int[Array, "B L"],
        shard: Shard,
    ) -> Float[Array, "B L D"]:
        """This shard's heads; the result is a partial sum over ``model``."""
        c = self.config
        plan = head_plan(c.heads, c.kv_heads, shard.tensor_parallel)
        q = einsum(x, own_heads(self.q[...], plan.queries, c.heads, 1), "b l d, d h c -> b l h c")
        k = einsum(x, own_heads(self.k[...], plan.key_values, c.kv_heads, 1), "b l d, d h c -> b l h c")
        v = einsum(x, own_heads(self.v[...], plan.key_values, c.kv_heads, 1), "b l d, d h c -> b l h c")
        out = attend(rotate(q, rotation), rotate(k, rotation), v, segments, c.attention_block)
        return einsum(out, own_heads(self.o[...], plan.queries, c.heads, 0), "b l h c, h c d -> b l d")


class SwiGLU(nnx.Module):
    """Gated MLP, ``down(silu(gate x) * up x)`` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: Any, rngs: nnx.Rngs, stack: int | None = None):
        init = nnx.initializers.normal(config.init_std)
        d, f = config.width, config.mlp
        self.gate = declare(rngs, init, (d, f), ("embed", "mlp"), config.param_dtype, stack)
        self.up = declare(rngs, init, (d, f), ("embed", "mlp"), config.param_dtype, stack)
        self.down = declare(rngs, init, (f, d), ("mlp", "embed"), config.param_dtype, stack)

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """This shard's neurons; the result is a partial sum over ``model``."""
        return (jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


def rotation_of(
    positions: Int[Array, "B L"], head_dim: int, theta: float, dtype: Any
) -> tuple[Float[Array, "B L 1 half"], Float[Array, "B L 1 half"]]:
    """Cosine and sine of rotary position embeddings (Su et al. 2021, arXiv:2104.09864), float32 or wider."""
    wide = jnp.promote_types(dtype, jnp.float32)
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=wide) / head_dim)
    angle = positions.astype(wide)[..., None] * frequency
    return jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]


def rotate(x: Float[Array, "B L H C"], rotation: tuple[jax.Array, jax.Array]) -> Float[Array, "B L H C"]:
    """Rotate the two halves of each head against each other (the layout of Hugging Face checkpoints)."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def embed_tokens(table: Float[Array, "V D"], tokens: Int[Array, "B L"], shard: Shard) -> Float[Array, "B Llocal D"]:
    """Look tokens up in a table whose rows are spread over the layout's vocabulary axes.

    Where those include axes of the batch, every shard looks up the tokens of all, and the results are scattered.
    """
    layout = shard.layout
    for axis in reversed(layout.shared_axes):
        tokens = all_gather(tokens, axis)
    local = tokens - shard_index(layout.vocab_axes) * table.shape[0]
    here = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.clip(local, 0, table.shape[0] - 1)].astype(shard.dtype)
    rows = jnp.where(here[..., None], rows, 0)
    for axis in layout.shared_axes:
        rows = scatter_to(rows, axis, 0)
    return shard.leave(rows)
