"""OLMo 2 (OLMo Team 2024, arXiv:2501.00656).

Norms after each block, inside the residual, and none before; queries and keys normalised over all their heads at once.
"""

from typing import Any

from spmd_distill.models.config import DecoderConfig
from spmd_distill.models.family import HuggingFace, llama_rules, read_config, refuse, write_config

ARCHITECTURES = ("Olmo2ForCausalLM",)
rules = llama_rules


def config_from_huggingface(config: HuggingFace) -> DecoderConfig:
    """Read a Hugging Face ``config.json``; raise `UserError` for a feature this family's code does not have."""
    refuse(config, "olmo2", attention_bias=False)
    return read_config({"rms_norm_eps": 1e-5, **config}, "olmo2", norms="after", qk_norm="all")


def config_to_huggingface(config: DecoderConfig, original: HuggingFace | None = None) -> dict[str, Any]:
    """Write a ``config.json``; ids of special tokens and the like are taken over from ``original``."""
    return write_config(config, "Olmo2ForCausalLM", "olmo2", original, attention_bias=False)
