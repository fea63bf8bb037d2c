"""The run file: one tree of frozen dataclasses, the same from YAML, from flags and from Python.

This package does not import jax, so that the command can read a run file before jax starts.
"""

from spmd_distill.config.data import DataConfig, SourceConfig
from spmd_distill.config.distributed import DistributedConfig
from spmd_distill.config.guards import GuardsConfig
from spmd_distill.config.logging import LoggingConfig, WandbConfig
from spmd_distill.config.models import HeadConfig, Order, PrecisionConfig, StudentConfig, TeacherConfig
from spmd_distill.config.objective import ObjectiveConfig
from spmd_distill.config.optimizer import OptimizerConfig
from spmd_distill.config.parse import parse_config, setting_names
from spmd_distill.config.run import RunConfig, to_dict
from spmd_distill.config.watch import CheckpointConfig, EvalConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DistributedConfig",
    "EvalConfig",
    "GuardsConfig",
    "HeadConfig",
    "LoggingConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Order",
    "PrecisionConfig",
    "RunConfig",
    "SourceConfig",
    "StudentConfig",
    "TeacherConfig",
    "WandbConfig",
    "parse_config",
    "setting_names",
    "to_dict",
]
