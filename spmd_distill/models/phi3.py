"""Phi-3, 3.5 and 4, dense (Abdin et al. 2024, arXiv:2404.14219).

Llama whose checkpoints hold queries, keys and values as one tensor, and gate and up of the MLP as another; a window in
every layer where the config has one; rotary positions stretched by two sets of factors in the long models.
"""

from typing import Any

from spmd_distill.models.config import DecoderConfig
from spmd_distill.models.family import HuggingFace, llama_rules, read_config, refuse, write_config
from spmd_distill.models.naming import Part, Rule, linear, per_head_out

ARCHITECTURES = ("Phi3ForCausalLM",)


def config_from_huggingface(config: HuggingFace) -> DecoderConfig:
    """Read a Hugging Face ``config.json``; raise `UserError` for a feature this family's code does not have."""
    refuse(config, "phi3", attention_bias=False)
    return read_config({"rms_norm_eps": 1e-5, **config}, "phi3", window=config.get("sliding_window"))


def config_to_huggingface(config: DecoderConfig, original: HuggingFace | None = None) -> dict[str, Any]:
    """Write a ``config.json``; ids of special tokens and the like are taken over from ``original``."""
    own: dict[str, Any] = {"sliding_window": config.window}
    if config.rope.original_length:
        own["original_max_position_embeddings"] = config.rope.original_length
    return write_config(config, "Phi3ForCausalLM", "phi3", original, **own)


def rules(config: DecoderConfig) -> dict[str, Rule]:
    """See `llama_rules`; several of our parameters are rows of one tensor."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    total, mlp, layer = queries + 2 * keys, config.mlp, "model.layers.{}."
    qkv, gate_up = layer + "self_attn.qkv_proj.weight", layer + "mlp.gate_up_proj.weight"
    return llama_rules(config) | {
        "layers.attention.q": Rule(qkv, per_head_out(config.heads), Part(0, queries, total)),
        "layers.attention.k": Rule(qkv, per_head_out(config.kv_heads), Part(queries, queries + keys, total)),
        "layers.attention.v": Rule(qkv, per_head_out(config.kv_heads), Part(queries + keys, total, total)),
        "layers.mlp.gate": Rule(gate_up, linear(), Part(0, mlp, 2 * mlp)),
        "layers.mlp.up": Rule(gate_up, linear(), Part(mlp, 2 * mlp, 2 * mlp)),
    }
