"""The whole of a run file."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from spmd_distill.config.data import DataConfig
from spmd_distill.config.distributed import DistributedConfig
from spmd_distill.config.guards import GuardsConfig
from spmd_distill.config.logging import LoggingConfig
from spmd_distill.config.models import HeadConfig, PrecisionConfig, StudentConfig, TeacherConfig
from spmd_distill.config.objective import ObjectiveConfig, check_objective
from spmd_distill.config.optimizer import OptimizerConfig
from spmd_distill.config.watch import CheckpointConfig, EvalConfig
from spmd_distill.errors import UserError


@dataclass(frozen=True)
class RunConfig:
    """Everything about a run."""

    run: str = "runs/distil"
    """The folder the run writes; it must not hold another run."""
    steps: int = 100
    """Optimizer steps of the whole run."""
    seed: int = 0
    """Of random parameters, dropout and sampling, and of the order of rows unless ``data.seed`` says otherwise."""
    mesh: str = "auto"
    """A built-in layout, the path of one, or ``auto``: dp2_tp4 on a CPU or 8 devices, else what the devices allow."""
    mapper: Literal["shard_map", "vmap", "pmap"] = "shard_map"
    """What runs the shards: the main path, all of them on one device, or the compatibility backend; all do the same."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)

    def __post_init__(self):
        """Check what no type can say."""
        for name in (
            "steps", "eval.rows", "checkpoint.keep",
            "checkpoint.every", "eval.every", "eval.new_tokens", "eval.samples_every",
        ):  # fmt: skip
            value: Any = self
            for part in name.split("."):
                value = getattr(value, part)
            if value < 1:
                raise UserError(f"Run file: {name} is {value}; it must be at least 1.")
        self.data.check()
        self.student.check()
        self.distributed.check()
        self.checkpoint.check()
        self.guards.check()
        self.optimizer.check()
        self.precision.check()
        self.logging.check()
        try:
            check_objective(self.objective)
        except UserError as error:
            raise UserError(f"Run file: {error}") from None
        for name in ("chunk", "memory_budget_mib"):
            value = getattr(self.head, name)
            if value is not None and value < 1:
                raise UserError(f"Run file: head.{name} is {value}; it must be at least 1, or null.")


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain dicts and lists, ready for YAML."""
    as_lists = lambda x: [as_lists(y) for y in x] if isinstance(x, (list, tuple)) else x  # noqa: E731
    return dataclasses.asdict(config, dict_factory=lambda items: {k: as_lists(v) for k, v in items})
