"""Gemma 3, text (Gemma Team 2025, arXiv:2503.19786).

Gemma 2 with queries and keys normalised head by head instead of soft caps; five layers with a window, with rotary
positions of their own, to one that sees everything.
"""

from typing import Any

from spmd_distill.models.config import DecoderConfig
from spmd_distill.models.family import LOCAL, HuggingFace, llama_rules, write_config
from spmd_distill.models.gemma2 import read_gemma, write_gemma
from spmd_distill.models.rope import Rope, rope_from_huggingface

ARCHITECTURES = ("Gemma3ForCausalLM",)
rules = llama_rules


def config_from_huggingface(config: HuggingFace) -> DecoderConfig:
    """Read a Hugging Face ``config.json``; raise `UserError` for a feature this family's code does not have."""
    config = {"rope_theta": 1e6, **config}
    every = config.get("sliding_window_pattern") or 6
    if LOCAL in (config.get("rope_parameters") or {}):
        near = rope_from_huggingface({**config, "rope_scaling": None}, LOCAL, "gemma3 config")
    else:
        near = Rope(float(config.get("rope_local_base_freq") or 10000.0))
    return read_gemma(config, "gemma3", (True,) * (every - 1) + (False,), qk_norm="head", local_rope=near)


def config_to_huggingface(config: DecoderConfig, original: HuggingFace | None = None) -> dict[str, Any]:
    """Write a ``config.json``; ids of special tokens and the like are taken over from ``original``."""
    near = (config.local_rope or config.rope).theta
    own = write_gemma(config) | {"rope_local_base_freq": near}
    written = write_config(config, "Gemma3ForCausalLM", "gemma3_text", original, **own)
    written.pop("sliding_window_pattern", None)  # layer_types says it, also for some of a teacher's layers
    return written
