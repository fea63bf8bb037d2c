"""What turns gradients into updates."""

from spmd_distill.optimizer.build import build_optimizer, build_rule
from spmd_distill.optimizer.paths import decayed, filled, only
from spmd_distill.optimizer.placement import moment_specs, on_host, state_specs
from spmd_distill.optimizer.rule import UpdateRule, as_rule
from spmd_distill.optimizer.schedules import build_schedule
from spmd_distill.optimizer.update import OF_THE_TEACHER, SKIP, Skip, all_finite, keep_unless

__all__ = [
    "OF_THE_TEACHER",
    "SKIP",
    "Skip",
    "UpdateRule",
    "all_finite",
    "as_rule",
    "build_optimizer",
    "build_rule",
    "build_schedule",
    "decayed",
    "filled",
    "keep_unless",
    "moment_specs",
    "on_host",
    "only",
    "state_specs",
]
