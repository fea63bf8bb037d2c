"""Distil a large language model into a small one as an SPMD program: one shard body under three mappers.

Names are imported when they are first used, so that ``import spmd_distill`` neither starts jax nor costs time.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Alpha": "divergences",
    "AlphaBeta": "divergences",
    "Batch": "types",
    "Checkpoints": "checkpoint",
    "CrossEntropy": "divergences",
    "DecoderConfig": "models",
    "Distillation": "step",
    "ForwardKL": "divergences",
    "FusedHead": "head",
    "GeneralizedJSD": "divergences",
    "Loader": "data",
    "LogitTransform": "types",
    "MeshLayout": "sharding",
    "Model": "models",
    "ModelCard": "interop",
    "NormalizedLogitMSE": "divergences",
    "Objective": "objective",
    "OnlineTeacher": "teachers",
    "Pretrained": "pretrained",
    "ReferenceHead": "head",
    "ReverseKL": "divergences",
    "RunConfig": "config",
    "Sampled": "head",
    "Sampling": "generation",
    "SkewKL": "divergences",
    "SkewReverseKL": "divergences",
    "SortedLogitULD": "divergences",
    "SquaredHellinger": "divergences",
    "TopK": "head",
    "TotalVariation": "divergences",
    "TrainState": "types",
    "Unembedded": "types",
    "UserError": "errors",
    "WeightedTerm": "objective",
    "ZLoss": "divergences",
    "create_state": "state",
    "decoder": "models",
    "distil": "train",
    "from_apply": "models.foreign",
    "from_nnx": "models.foreign",
    "generate": "generation",
    "generate_text": "generation",
    "init_params": "state",
    "layout_names": "sharding",
    "load_pretrained": "pretrained",
    "make_mapper": "mappers",
    "open_checkpoint": "loading",
    "pack": "data",
    "parse_config": "config",
    "place_params": "state",
    "prepare_jax": "runtime",
    "save_huggingface": "interop",
    "save_pretrained": "pretrained",
    "select_layers": "state",
    "verify": "proof",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'spmd_distill' has no attribute {name!r}")
    return getattr(importlib.import_module(f"spmd_distill.{_HOME[name]}"), name)
