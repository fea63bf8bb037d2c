"""The Llama family (Llama, SmolLM2): its Hugging Face config and the names and shapes of its tensors."""

from collections.abc import Mapping
from typing import Any

from spmd_distill.errors import UserError
from spmd_distill.models.decoder import DecoderConfig
from spmd_distill.models.naming import Rule, linear, per_head_in, per_head_out, same, vocab_rows

ARCHITECTURES = ("LlamaForCausalLM",)


def config_from_huggingface(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a Hugging Face ``config.json``; raise `UserError` for a feature this family's code does not have."""
    scaling = config.get("rope_scaling") or {}
    rope = {**scaling, **(config.get("rope_parameters") or {})}
    if rope.get("rope_type", rope.get("type", "default")) not in ("default", None):
        raise UserError(f"Llama config: rope type {rope.get('rope_type', rope.get('type'))!r} is not supported.")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UserError(f"Llama config: {key}: true is not supported; only models without biases are.")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"Llama config: hidden_act {config['hidden_act']!r} is not supported; expected 'silu'.")
    try:
        heads = config["num_attention_heads"]
        return DecoderConfig(
            vocab_size=config["vocab_size"],
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp=config["intermediate_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_length=config.get("max_position_embeddings", 2048),
        )
    except KeyError as error:
        raise UserError(f"Llama config: the key {error} is missing.") from error


def config_to_huggingface(config: DecoderConfig, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write a ``config.json``; ids of special tokens and the like are taken over from ``original``."""
    return {
        **(original or {}),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.tokens,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_length,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def rules(config: DecoderConfig) -> dict[str, Rule]:
    """Our parameter path -> its Hugging Face name (``{}`` is the layer) and how the two shapes are turned."""
    layer = "model.layers.{}."
    table = {
        "embed": Rule("model.embed_tokens.weight", vocab_rows(config.vocab_size, config.padded_vocab)),
        "norm.scale": Rule("model.norm.weight", same()),
        "layers.attention_norm.scale": Rule(layer + "input_layernorm.weight", same()),
        "layers.attention.q": Rule(layer + "self_attn.q_proj.weight", per_head_out(config.heads)),
        "layers.attention.k": Rule(layer + "self_attn.k_proj.weight", per_head_out(config.kv_heads)),
        "layers.attention.v": Rule(layer + "self_attn.v_proj.weight", per_head_out(config.kv_heads)),
        "layers.attention.o": Rule(layer + "self_attn.o_proj.weight", per_head_in(config.heads)),
        "layers.mlp_norm.scale": Rule(layer + "post_attention_layernorm.weight", same()),
        "layers.mlp.gate": Rule(layer + "mlp.gate_proj.weight", linear()),
        "layers.mlp.up": Rule(layer + "mlp.up_proj.weight", linear()),
        "layers.mlp.down": Rule(layer + "mlp.down_proj.weight", linear()),
    }
    if not config.tied:
        table["unembed"] = Rule("lm_head.weight", vocab_rows(config.vocab_size, config.padded_vocab))
    return table
