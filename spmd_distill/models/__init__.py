"""Decoders in per-shard form, and the families whose checkpoints they read and write."""

from types import ModuleType

from spmd_distill.models import llama
from spmd_distill.models.base import Model as Model
from spmd_distill.models.base import Shard as Shard
from spmd_distill.models.decoder import DecoderConfig as DecoderConfig
from spmd_distill.models.decoder import decoder as decoder
from spmd_distill.models.transfer import export_params as export_params
from spmd_distill.models.transfer import load_params as load_params

__all__ = ["llama"]

FAMILIES: dict[str, ModuleType] = {name: llama for name in llama.ARCHITECTURES}
"""Family module by the architecture name in ``config.json``."""
