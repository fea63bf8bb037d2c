"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118).

Norms before and after each block, their scales stored as a difference to 1; soft caps on scores and logits; every
other layer has a window, from the first on; the embedding is scaled by the root of the width.
"""

import math
from typing import Any

from spmd_distill.models.config import DecoderConfig
from spmd_distill.models.family import (
    THEIR_ACTIVATIONS,
    HuggingFace,
    llama_rules,
    local_layers,
    read_config,
    refuse,
    write_config,
    write_layer_types,
)

ARCHITECTURES = ("Gemma2ForCausalLM",)
rules = llama_rules


def config_from_huggingface(config: HuggingFace) -> DecoderConfig:
    """Read a Hugging Face ``config.json``; raise `UserError` for a feature this family's code does not have."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return read_gemma(caps | dict(config), "gemma2", pattern=(True, False))


def read_gemma(config: HuggingFace, family: str, pattern: tuple[bool, ...], **differences: Any) -> DecoderConfig:
    """What all Gemmas differ in from Llama, and the ``differences`` of one; ``pattern`` says which layers are local."""
    refuse(config, family, attention_bias=False, use_bidirectional_attention=False)
    config = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **config}
    return read_config(
        config,
        family,
        tied=True,
        norms="both",
        norm_offset=1.0,
        embed_scale=math.sqrt(config.get("hidden_size", 0)),
        attention_scale=(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        attention_softcap=config.get("attn_logit_softcapping"),
        logit_softcap=config.get("final_logit_softcapping"),
        window=config.get("sliding_window", 4096),
        local_layers=local_layers(config, family, pattern),
        **differences,
    )


def config_to_huggingface(config: DecoderConfig, original: HuggingFace | None = None) -> dict[str, Any]:
    """Write a ``config.json``; ids of special tokens and the like are taken over from ``original``."""
    return write_config(config, "Gemma2ForCausalLM", "gemma2", original, **write_gemma(config))


def write_gemma(config: DecoderConfig) -> dict[str, Any]:
    """The keys that all Gemmas write."""
    scale = config.attention_scale or config.head_dim**-0.5
    squared = scale**-2
    return {
        "attention_bias": False,
        "hidden_activation": THEIR_ACTIVATIONS[config.activation],
        "query_pre_attn_scalar": round(squared) if abs(squared - round(squared)) < 1e-6 else squared,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": config.window,
        "layer_types": write_layer_types(config),
    }
