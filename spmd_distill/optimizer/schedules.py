"""Learning rates by optimizer step."""

import jax.numpy as jnp
import optax

from spmd_distill.config import OptimizerConfig


def build_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up (the first step already moves), then what ``config.schedule`` names, up to the last of ``steps``.

    ``inverse_sqrt`` is Vaswani et al.'s (arXiv:1706.03762), ``wsd`` Hu et al.'s (arXiv:2404.06395) with a linear decay.
    """
    warmup = min(config.warmup_steps, max(steps - 1, 0))
    peak, first = config.learning_rate, config.learning_rate / (warmup + 1)
    end, total = peak * config.final_fraction, max(steps, warmup + 1)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(first, peak, warmup, total, end)
    if config.schedule == "inverse_sqrt":
        start = max(warmup, 1)  # the root of 0 is no divisor
        after = lambda step: peak * (start / (start + jnp.maximum(step, 0))) ** 0.5  # noqa: E731
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, total - warmup)
    elif config.schedule == "wsd":
        decay = max(min(round(config.decay_fraction * total), total - warmup), 1)
        after = optax.linear_schedule(peak, end, decay, total - warmup - decay)
    else:
        after = optax.constant_schedule(peak)
    return optax.join_schedules([optax.linear_schedule(first, peak, warmup), after], [warmup]) if warmup else after
