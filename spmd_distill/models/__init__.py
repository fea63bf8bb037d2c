"""Decoders in per-shard form, and the families whose checkpoints they read and write."""

from types import ModuleType

from spmd_distill.models import gemma2, gemma3, llama, mistral, olmo2, phi3, qwen2, qwen3
from spmd_distill.models.base import Model as Model
from spmd_distill.models.base import Shard as Shard
from spmd_distill.models.base import keys_of_rows as keys_of_rows
from spmd_distill.models.config import DecoderConfig as DecoderConfig
from spmd_distill.models.decoder import decoder as decoder
from spmd_distill.models.transfer import export_params as export_params
from spmd_distill.models.transfer import load_params as load_params

__all__ = ["gemma2", "gemma3", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"]

FAMILIES: dict[str, ModuleType] = {
    name: family
    for family in (llama, mistral, qwen2, qwen3, gemma2, gemma3, olmo2, phi3)
    for name in family.ARCHITECTURES
}
"""Family module by the architecture name in ``config.json``."""
