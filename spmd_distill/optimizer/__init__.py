"""What turns gradients into updates."""

from spmd_distill.optimizer.build import build_optimizer, build_schedule, decayed

__all__ = ["build_optimizer", "build_schedule", "decayed"]
