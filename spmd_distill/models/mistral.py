"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with a window in every layer, where the config has one."""

from typing import Any

from spmd_distill.models.config import DecoderConfig
from spmd_distill.models.family import HuggingFace, llama_rules, read_config, write_config

ARCHITECTURES = ("MistralForCausalLM",)
rules = llama_rules


def config_from_huggingface(config: HuggingFace) -> DecoderConfig:
    """Read a Hugging Face ``config.json``; raise `UserError` for a feature this family's code does not have."""
    return read_config(config, "mistral", window=config.get("sliding_window"))


def config_to_huggingface(config: DecoderConfig, original: HuggingFace | None = None) -> dict[str, Any]:
    """Write a ``config.json``; ids of special tokens and the like are taken over from ``original``."""
    return write_config(config, "MistralForCausalLM", "mistral", original, sliding_window=config.window)
