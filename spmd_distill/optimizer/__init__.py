"""What turns gradients into updates."""

from spmd_distill.optimizer.build import build_optimizer, build_schedule, decayed
from spmd_distill.optimizer.update import OF_THE_TEACHER, SKIP, Skip, all_finite, guarded_update, keep_unless

__all__ = [
    "OF_THE_TEACHER",
    "SKIP",
    "Skip",
    "all_finite",
    "build_optimizer",
    "build_schedule",
    "decayed",
    "guarded_update",
    "keep_unless",
]
