"""Settings of what turns gradients into updates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay, behind a clip of the global gradient norm."""

    learning_rate: float = 1e-3
    warmup_steps: int = 10
    final_fraction: float = 0.1
    """The learning rate ends at this part of its peak."""
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0
