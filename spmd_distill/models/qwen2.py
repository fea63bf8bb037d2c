"""Qwen 2 and 2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on queries, keys and values.

A window, off in every released model, belongs to the layers from ``max_window_layers`` on.
"""

from typing import Any

from spmd_distill.models.config import DecoderConfig
from spmd_distill.models.family import (
    HuggingFace,
    llama_rules,
    local_layers,
    read_config,
    write_config,
    write_layer_types,
)

ARCHITECTURES = ("Qwen2ForCausalLM",)
rules = llama_rules


def config_from_huggingface(config: HuggingFace) -> DecoderConfig:
    """Read a Hugging Face ``config.json``; raise `UserError` for a feature this family's code does not have."""
    return read_config(config, "qwen2", qkv_bias=True, **window_of(config, "qwen2"))


def config_to_huggingface(config: DecoderConfig, original: HuggingFace | None = None) -> dict[str, Any]:
    """Write a ``config.json``; ids of special tokens and the like are taken over from ``original``."""
    return write_config(config, "Qwen2ForCausalLM", "qwen2", original, **write_window(config))


def window_of(config: HuggingFace, family: str) -> dict[str, Any]:
    """Window and local layers of a Qwen config."""
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return {}
    first, depth = config.get("max_window_layers", 28), config.get("num_hidden_layers", 0)
    local = local_layers(config, family) or tuple(i >= first for i in range(depth))
    return {"window": config["sliding_window"], "local_layers": local} if any(local) else {}


def write_window(config: DecoderConfig) -> dict[str, Any]:
    """The keys of a Qwen config that say which layers have a window."""
    windowed = config.window is not None
    found: dict[str, Any] = {"use_sliding_window": windowed, "sliding_window": config.window}
    if windowed:
        local = config.is_local
        found |= {"max_window_layers": local.index(True), "layer_types": write_layer_types(config)}
    return found
