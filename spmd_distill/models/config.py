"""The sizes of a decoder and the ways in which families differ: data that the one decoder reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from spmd_distill.errors import UserError
from spmd_distill.models.attention import ATTENDED, KERNELS
from spmd_distill.models.base import SUMMED
from spmd_distill.models.rope import PLAIN, Rope

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

CHOICES = {
    "activation": ("silu", "gelu_tanh", "gelu"),
    "qk_norm": ("none", "head", "all"),
    "norms": ("before", "after", "both"),
    "remat": tuple(REMAT_POLICIES),
    "attention": KERNELS,
}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder, and how its family's differs from Llama's. Raises `UserError` where they do not fit."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool = True
    rope: Rope = PLAIN
    norm_eps: float = 1e-5
    max_length: int = 2048
    """Positions of the training, as the checkpoint says; nothing is cut at it."""
    dropout: float = 0.0
    remat: str = "none"
    attention_block: int = 512
    """Queries whose scores are alive at a time; a setting of memory and speed, not of the model."""
    attention: str = "blockwise"
    """What computes attention, one of `attention.KERNELS`; a setting of speed and precision, not of the model."""
    param_dtype: str = "float32"
    init_std: float = 0.02
    family: str = "llama"
    vocab_rows: int | None = None
    """Rows of embedding and unembedding as stored, where another model's must line up with them; null pads
    ``vocab_size``. Fewer than ``vocab_size`` cut the tokens from there on out of the model."""

    # What families differ in

    activation: str = "silu"
    """What the gate of the MLP goes through: ``silu``, ``gelu_tanh`` (Gemma) or ``gelu``."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias (Qwen 2)."""
    qk_norm: str = "none"
    """Queries and keys are normalised head by head (``head``: Qwen 3, Gemma 3) or over all heads (``all``: OLMo 2)."""
    norms: str = "before"
    """Blocks are normalised ``before`` (Llama), ``after`` inside the residual (OLMo 2), or ``both`` (Gemma)."""
    norm_offset: float = 0.0
    """Added to every stored norm scale (Gemma: 1)."""
    embed_scale: float = 1.0
    """Factor on the embedding, rounded to the compute type (Gemma: the root of the width)."""
    attention_scale: float | None = None
    """Factor on products of queries and keys; None is ``1 / sqrt(head_dim)``."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    window: int | None = None
    """How many tokens a token of a local layer sees, itself included."""
    local_layers: tuple[bool, ...] | None = None
    """Which layers have the window; None is all of them, where there is one."""
    local_rope: Rope | None = None
    """Rotary positions of the local layers, where these have their own (Gemma 3)."""

    def __post_init__(self):
        """Check the sizes."""
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp", "attention_block"):
            if getattr(self, name) < 1:
                raise UserError(f"Decoder: {name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("vocab_rows", "window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"Decoder: {name} is {value}; it must be at least 1, or null.")
        if self.heads % self.kv_heads:
            raise UserError(
                f"Decoder: {self.heads} query heads cannot share {self.kv_heads} key/value heads evenly; heads must "
                f"be a multiple of kv_heads."
            )
        if self.head_dim % 2:
            raise UserError(f"Decoder: head_dim is {self.head_dim}; rotary positions need an even number.")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UserError(f"Decoder: unknown {name} {getattr(self, name)!r}; expected one of {', '.join(known)}.")
        if self.attention != "blockwise" and self.attention_softcap is not None:
            raise UserError(
                f"Decoder: attention by {self.attention} has no soft cap, which this model needs; choose blockwise."
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"Decoder: dropout is {self.dropout}; expected 0 <= dropout < 1.")
        if self.local_rope is not None and self.local_rope.fraction != self.rope.fraction:
            raise UserError(
                f"Decoder: local layers turn {self.local_rope.fraction} of a head's channels, the others "
                f"{self.rope.fraction}; expected the same."
            )
        if self.local_layers is not None:
            if len(self.local_layers) != self.layers:
                raise UserError(
                    f"Decoder: {len(self.local_layers)} entries in local_layers for {self.layers} layers; expected "
                    f"one a layer."
                )
            if any(self.local_layers) and self.window is None:
                raise UserError("Decoder: local_layers names layers with a window, but window is null.")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding as stored."""
        return self.vocab_rows or -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def tokens(self) -> int:
        """Tokens it has rows for: ``vocab_size``, or ``vocab_rows`` where these are fewer."""
        return min(self.vocab_size, self.padded_vocab)

    @property
    def is_local(self) -> tuple[bool, ...]:
        """For every layer, whether it has the window."""
        return (self.window is not None,) * self.layers if self.local_layers is None else self.local_layers

    def of_layers(self, layers: Sequence[int]) -> "DecoderConfig":
        """The config of a model made of these layers of this one, in order."""
        local = None if self.local_layers is None else tuple(self.local_layers[i] for i in layers)
        return replace(self, layers=len(layers), local_layers=local)
