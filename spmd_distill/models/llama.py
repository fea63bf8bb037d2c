"""Llama 2 to 3.2 and SmolLM2 (Touvron et al. 2023, arXiv:2307.09288; Grattafiori et al. 2024, arXiv:2407.21783).

What the other families are measured against: norms before the blocks, SiLU, no biases; from 3.1 on stretched rotary
positions.
"""

from typing import Any

from spmd_distill.models.config import DecoderConfig
from spmd_distill.models.family import HuggingFace, llama_rules, read_config, refuse, write_config

ARCHITECTURES = ("LlamaForCausalLM",)
rules = llama_rules


def config_from_huggingface(config: HuggingFace) -> DecoderConfig:
    """Read a Hugging Face ``config.json``; raise `UserError` for a feature this family's code does not have."""
    refuse(config, "llama", attention_bias=False, mlp_bias=False)
    return read_config(config, "llama")


def config_to_huggingface(config: DecoderConfig, original: HuggingFace | None = None) -> dict[str, Any]:
    """Write a ``config.json``; ids of special tokens and the like are taken over from ``original``."""
    no_bias = {"attention_bias": False, "mlp_bias": False}
    return write_config(config, "LlamaForCausalLM", "llama", original, **no_bias)
