"""A decoder: embedding, a scan over stacked layers, a final norm; it stops before the vocabulary matmul."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_distill.collectives import collect_from, vary_like
from spmd_distill.models.attention import Window
from spmd_distill.models.base import Model, Shard, Use, declare, dropout_factors, token_keys
from spmd_distill.models.cache import Cache, LayerCache
from spmd_distill.models.config import REMAT_POLICIES, DecoderConfig
from spmd_distill.models.layers import Attention, GatedMLP, RMSNorm, embed_tokens
from spmd_distill.models.rope import Rotation, rotation_of
from spmd_distill.models.taps import Kept, Wanted, listening, tap
from spmd_distill.types import Batch, LogitTransform, Unembedded

_NO_WINDOW = 2**30
"""For the layers that see everything, in a scan over layers of which others have a window."""


class Block(nnx.Module):
    """Attention and MLP, each with its norms and inside a residual; ``stack`` layers of them in one module."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, stack: int | None = None):
        self.norms = config.norms
        self.attention, self.mlp = Attention(config, rngs, stack), GatedMLP(config, rngs, stack)
        if config.norms != "after":
            self.attention_norm, self.mlp_norm = RMSNorm(config, rngs, stack), RMSNorm(config, rngs, stack)
        if config.norms != "before":
            self.attention_post_norm, self.mlp_post_norm = RMSNorm(config, rngs, stack), RMSNorm(config, rngs, stack)

    def __call__(
        self,
        h: jax.Array,
        rotation: Rotation,
        segments: jax.Array,
        factors: jax.Array | None,
        shard: Shard,
        window: Window,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """One layer: ``h [B, Llocal, D]`` in and out; ``factors`` multiply the two residual branches (dropout)."""
        tap("block_input", h)
        x = shard.enter(h if self.norms == "after" else self.attention_norm(h, shard))
        x, cache = self.attention(tap("attention_input", x), rotation, segments, shard, window, cache)
        x = shard.leave(x)
        x = tap("attention_output", x if self.norms == "before" else self.attention_post_norm(x, shard))
        h = h + (x if factors is None else x * factors[0])
        x = shard.enter(h if self.norms == "after" else self.mlp_norm(h, shard))
        x = shard.leave(self.mlp(tap("mlp_input", x)))
        x = tap("mlp_output", x if self.norms == "before" else self.mlp_post_norm(x, shard))
        return tap("block_output", h + (x if factors is None else x * factors[1])), cache


class Decoder(nnx.Module):
    """The nnx module. Outside of a shard body it is only ever traced for shapes and initial values."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(config.init_std)
        table = (config.padded_vocab, config.width)
        self.embed = declare(rngs, init, table, ("vocab", "embed"), config.param_dtype, None)
        self.layers = Block(config, rngs, config.layers)
        self.norm = RMSNorm(config, rngs)
        if not config.tied:
            self.unembed = declare(rngs, init, table, ("vocab", "embed"), config.param_dtype, None)

    def __call__(
        self,
        batch: Batch,
        shard: Shard,
        uses: Any,
        row_keys: jax.Array | None = None,
        cache: Cache | None = None,
        taps: Wanted | None = None,
    ) -> Unembedded | tuple[Unembedded, Any]:
        """See `Model.apply`; with a cache, see `Model.apply_cached`, with taps, `Model.apply_tapped`."""
        config = self.config
        h, table = embed_tokens(self._table(self.embed, shard, uses["embed"]), batch.tokens, shard)
        unembed = table if config.tied else self._table(self.unembed, shard, uses["unembed"])
        if config.embed_scale != 1:
            h = h * jnp.asarray(config.embed_scale, h.dtype)
        rotation_in, window_in = self._places(batch.positions, shard)
        keys = None
        if row_keys is not None and config.dropout > 0:
            keys = token_keys(row_keys, h.shape[1], shard)

        if cache is not None:
            cache = cache.expecting(batch.segments)
        graphdef, stacked = nnx.split(self.layers)

        def layer(h: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
            number, params, memory = xs
            block: Any = nnx.merge(graphdef, shard.materialise(params, uses["layers"]))
            factors = None
            if keys is not None:
                factors = dropout_factors(keys, number, 2, config.dropout, config.width, shard.dtype)
            before = None if cache is None else cache.layer(*memory)
            with listening(taps or {}) as seen:
                h, after = block(h, rotation_in(number), batch.segments, factors, shard, window_in(number), before)
            return h, (seen, None if after is None else (after.k, after.v))

        if (policy := REMAT_POLICIES[config.remat]) is not None:
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        memories = None if cache is None else (cache.k, cache.v)
        layers = (jnp.arange(config.layers), nnx.to_pure_dict(stacked), memories)
        h = vary_like(h, batch.tokens)
        kept, inside = Kept(taps or {}, config.layers), {}
        if taps:
            _, (seen, _) = jax.eval_shape(layer, h, jax.tree.map(lambda x: x[0], layers))
            inside = kept.start(seen, h)

        def through(carried: tuple[jax.Array, Any], xs: Any) -> tuple[Any, Any]:
            h, inside = carried
            h, (seen, written) = layer(h, xs)
            inside, rest = kept.put(inside, seen, xs[0])
            return (h, inside), (rest, written)

        (h, inside), (seen, written) = jax.lax.scan(through, (h, inside), layers)
        with listening(taps or {}) as at_end:
            h = tap("final_norm", self.norm(h, shard))
        if shard.layout.sequence_sharded:  # a head sees all tokens of its rows on every shard of model
            whole: Any = collect_from(h, "model", 1)
            h = whole
        transform = LogitTransform(config.tokens, softcap=config.logit_softcap)
        out = Unembedded(h.reshape(-1, config.width), unembed, transform)
        if taps is not None:
            return out, {**seen, **inside, **jax.tree.map(lambda x: x[None], at_end)}
        if cache is None or written is None:
            return out
        return out, cache.after(written[0], written[1], batch.segments.shape[1])

    def _places(self, positions: jax.Array, shard: Shard) -> tuple[Any, Any]:
        """Two functions of a layer's number: its rotation and its window."""
        config, wide, near = self.config, None, None
        local, window = jnp.asarray(config.is_local), config.window or _NO_WINDOW
        if not all(config.is_local) or config.local_rope is None:
            wide = rotation_of(positions, config.head_dim, config.rope, shard.dtype)
        if any(config.is_local) and config.local_rope is not None:
            near = rotation_of(positions, config.head_dim, config.local_rope, shard.dtype)

        def rotation_in(number: jax.Array) -> Any:
            if wide is None or near is None:
                return near if wide is None else wide
            return tuple(jnp.where(local[number], a, b) for a, b in zip(near, wide, strict=True))

        def window_in(number: jax.Array) -> Window:
            if all(config.is_local):
                return config.window
            return jnp.where(local[number], window, _NO_WINDOW) if any(config.is_local) else None

        return rotation_in, window_in

    @staticmethod
    def _table(parameter: nnx.Param, shard: Shard, use: Use) -> jax.Array:
        """An embedding table, gathered once a step under FSDP; otherwise as stored, and cast where it is used."""
        return shard.materialise(parameter[...], use) if use.gather_axes else parameter[...]


def decoder(config: DecoderConfig) -> Model:
    """A decoder of these sizes, split and ready for the step."""
    return Model(lambda rngs: Decoder(config, rngs), config)
