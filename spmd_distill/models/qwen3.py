"""Qwen 3, dense (Yang et al. 2025, arXiv:2505.09388): Llama with queries and keys normalised head by head."""

from typing import Any

from spmd_distill.models.config import DecoderConfig
from spmd_distill.models.family import HuggingFace, llama_rules, read_config, refuse, write_config
from spmd_distill.models.qwen2 import window_of, write_window

ARCHITECTURES = ("Qwen3ForCausalLM",)
rules = llama_rules


def config_from_huggingface(config: HuggingFace) -> DecoderConfig:
    """Read a Hugging Face ``config.json``; raise `UserError` for a feature this family's code does not have."""
    refuse(config, "qwen3", attention_bias=False)
    return read_config({"head_dim": 128, **config}, "qwen3", qk_norm="head", **window_of(config, "qwen3"))


def config_to_huggingface(config: DecoderConfig, original: HuggingFace | None = None) -> dict[str, Any]:
    """Write a ``config.json``; ids of special tokens and the like are taken over from ``original``."""
    return write_config(config, "Qwen3ForCausalLM", "qwen3", original, attention_bias=False, **write_window(config))
