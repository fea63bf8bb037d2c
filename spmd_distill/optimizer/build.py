"""From the run file to an optax optimizer and its schedule."""

from typing import Any

import jax
import optax

from spmd_distill.config import OptimizerConfig


def build_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up (the first step already moves), then cosine decay to ``final_fraction`` of the peak."""
    warmup = min(config.warmup_steps, max(steps - 1, 0))
    peak = config.learning_rate
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=peak * config.final_fraction,
    )


def build_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW behind a clip of the global gradient norm; norm scales and biases are not decayed."""
    adamw = optax.adamw(
        schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decayed
    )
    return adamw if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def decayed(params: Any) -> Any:
    """Which parameters weight decay applies to: all but the scales of norms and the biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not str(getattr(path[-1], "key", "")).endswith(("scale", "bias")), params
    )
