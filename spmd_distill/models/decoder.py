"""A pre-norm decoder: embedding, a scan over stacked layers, a final norm; it stops before the vocabulary matmul."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_distill.collectives import collect_from, vary_like
from spmd_distill.errors import UserError
from spmd_distill.models.attention import ATTENDED
from spmd_distill.models.base import SUMMED, Model, Shard, Use, declare, dropout_factors, token_keys
from spmd_distill.models.layers import Attention, RMSNorm, SwiGLU, embed_tokens, rotation_of
from spmd_distill.types import Batch, LogitTransform, Unembedded

VOCAB_MULTIPLE = 128
"""Rows of the embedding are padded to a multiple of this: cut evenly by any mesh, and the same in every checkpoint."""

_SENT = jax.checkpoint_policies.save_only_these_names(SUMMED, ATTENDED)
REMAT_POLICIES: dict[str, Any] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "sums": _SENT,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        _SENT, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}
"""What a layer's forward pass keeps for its backward pass, by the name run files use: everything; only its input; its
input, what attention returned and the sums over shards, so that nothing but parameters is sent again; these and the
results of its matmuls."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder. Raises `UserError` where they do not fit together."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_length: int = 2048
    dropout: float = 0.0
    remat: str = "none"
    attention_block: int = 512
    """Queries whose scores are alive at a time; a setting of memory and speed, not of the model."""
    param_dtype: str = "float32"
    init_std: float = 0.02
    family: str = "llama"
    vocab_rows: int | None = None
    """Rows of embedding and unembedding as stored, where another model's must line up with them; null pads
    ``vocab_size``. Fewer than ``vocab_size`` cut the tokens from there on out of the model."""

    def __post_init__(self):
        """Check the sizes."""
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp", "attention_block"):
            if getattr(self, name) < 1:
                raise UserError(f"Decoder: {name} is {getattr(self, name)}; it must be at least 1.")
        if self.vocab_rows is not None and self.vocab_rows < 1:
            raise UserError(f"Decoder: vocab_rows is {self.vocab_rows}; it must be at least 1, or null.")
        if self.heads % self.kv_heads:
            raise UserError(
                f"Decoder: {self.heads} query heads cannot share {self.kv_heads} key/value heads evenly; heads must "
                f"be a multiple of kv_heads."
            )
        if self.head_dim % 2:
            raise UserError(f"Decoder: head_dim is {self.head_dim}; rotary positions need an even number.")
        if self.remat not in REMAT_POLICIES:
            raise UserError(f"Decoder: unknown remat {self.remat!r}; expected one of {', '.join(REMAT_POLICIES)}.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"Decoder: dropout is {self.dropout}; expected 0 <= dropout < 1.")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding as stored."""
        return self.vocab_rows or -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def tokens(self) -> int:
        """Tokens it has rows for: ``vocab_size``, or ``vocab_rows`` where these are fewer."""
        return min(self.vocab_size, self.padded_vocab)


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and inside a residual; ``stack`` layers of them in one module."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, stack: int | None = None):
        self.attention_norm = RMSNorm(config, rngs, stack)
        self.attention = Attention(config, rngs, stack)
        self.mlp_norm = RMSNorm(config, rngs, stack)
        self.mlp = SwiGLU(config, rngs, stack)

    def __call__(self, h, rotation, segments, factors, shard: Shard):
        """One layer: ``h [B, Llocal, D]`` in and out; ``factors`` multiply the two residual branches (dropout)."""
        x = shard.leave(self.attention(shard.enter(self.attention_norm(h, shard)), rotation, segments, shard))
        h = h + (x if factors is None else x * factors[0])
        x = shard.leave(self.mlp(shard.enter(self.mlp_norm(h, shard))))
        return h + (x if factors is None else x * factors[1])


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

    def __call__(self, batch: Batch, shard: Shard, uses: Any, dropout_key: jax.Array | None = None) -> Unembedded:
        """See `Model.apply`."""
        config = self.config
        table = self._table(self.embed, shard, uses["embed"])
        unembed = table if config.tied else self._table(self.unembed, shard, uses["unembed"])
        rotation = rotation_of(batch.positions, config.head_dim, config.rope_theta, shard.dtype)
        h = embed_tokens(table, batch.tokens, shard)
        keys = None
        if dropout_key is not None and config.dropout > 0:
            keys = token_keys(dropout_key, h.shape[0], h.shape[1], shard)

        graphdef, stacked = nnx.split(self.layers)

        def layer(h: jax.Array, xs: Any) -> tuple[jax.Array, None]:
            number, params = xs
            block: Any = nnx.merge(graphdef, shard.materialise(params, uses["layers"]))
            factors = None
            if keys is not None:
                factors = dropout_factors(keys, number, 2, config.dropout, config.width, shard.dtype)
            return block(h, rotation, batch.segments, factors, shard), None

        if (policy := REMAT_POLICIES[config.remat]) is not None:
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        stacked = nnx.to_pure_dict(stacked)
        h, _ = jax.lax.scan(layer, vary_like(h, batch.tokens), (jnp.arange(config.layers), stacked))

        h = self.norm(h, shard)
        if shard.layout.sequence_sharded:  # a head sees all tokens of its rows on every shard of model
            whole: Any = collect_from(h, "model", 1)
            h = whole
        return Unembedded(h.reshape(-1, config.width), unembed, LogitTransform(config.tokens))

    @staticmethod
    def _table(parameter: nnx.Param, shard: Shard, use: Use) -> jax.Array:
        """An embedding table, gathered once a step under FSDP; otherwise as stored, and cast where it is used."""
        return shard.materialise(parameter[...], use) if use.gather_axes else parameter[...]


def decoder(config: DecoderConfig) -> Model:
    """A decoder of these sizes, split and ready for the step."""
    return Model(lambda rngs: Decoder(config, rngs), config)
