"""Settings of what turns gradients into updates."""

from dataclasses import dataclass, field
from typing import Any, Literal

from spmd_distill.errors import UserError


@dataclass(frozen=True)
class OptimizerConfig:
    """An optax optimizer on a schedule, behind a clip of the global gradient norm, and what it may touch."""

    name: str = "adamw"
    """An optimizer of optax or optax.contrib by its name there (``lion``, ``muon``, ``adafactor``,
    ``schedule_free_adamw``, ...), or ``my_package.module:factory``: a function of yours that takes ``learning_rate`` (a
    schedule) and ``options``, and returns an optax transformation."""
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of that optimizer, by its own names for them."""
    learning_rate: float = 1e-3
    """The peak of the schedule."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """What follows the warm-up: a cosine or a line down to ``final_fraction`` at the last step; nothing; nothing until
    the last ``decay_fraction`` of the steps and then a line (``wsd``, warm-up, stable, decay); a fall with the root of
    the step."""
    warmup_steps: int = 10
    """Steps of linear warm-up; the first one already moves."""
    final_fraction: float = 0.1
    """The learning rate of ``cosine``, ``linear`` and ``wsd`` ends at this part of its peak."""
    decay_fraction: float = 0.2
    """Which part of all steps ``wsd`` decays in, at the end."""
    weight_decay: float | None = None
    """Null is 0.01 for an optimizer that has a decay and a mask for it, and the optimizer's own for any other."""
    no_decay: tuple[str, ...] = ("*scale", "*bias")
    """Parameters that are not decayed, by patterns for their dotted names."""
    b1: float | None = None
    """Decay of the first moment. Null is 0.9 for AdamW, and any other optimizer's own. So it is with ``b2`` (0.95) and
    ``eps`` (1e-8)."""
    b2: float | None = None
    """Decay of the second moment."""
    eps: float | None = None
    """What is added to the root of the second moment."""
    clip_norm: float | None = 1.0
    """The global gradient norm is clipped to this; null leaves it."""
    freeze: tuple[str, ...] = ()
    """Parameters that stay as they are, by patterns for their dotted names (``embed``, ``layers.attention.*``). They
    have no gradient, no decay and no optimizer state."""
    state: Literal["float32", "bfloat16", "int8"] = "float32"
    """What the optimizer's moments are held in. float32 is float64 where the parameters are. Both others are rounded up
    or down by chance, so that a slow moving average still moves; int8 has a scale for every block of up to 256."""
    ema: float | None = None
    """Decay of a moving average of the parameters, in float32 or wider. It is then what is evaluated and exported. It
    starts as the student, with a decay of ``min(ema, (1 + n) / (10 + n))`` after n steps."""
    shard_state: bool = False
    """Optimizer state, and the moving average, are also cut over the batch axes where parameters are copied over them
    (ZeRO): every device updates its part, and parameters are gathered."""
    offload: bool = False
    """Between steps, optimizer state and moving average lie in the host's memory."""

    def check(self) -> None:
        """Raise `UserError` for what is out of its range."""

        def expect(good: bool, name: str, expected: str) -> None:
            if not good:
                raise UserError(f"Run file: optimizer.{name} is {getattr(self, name)}; expected {expected}.")

        expect(self.learning_rate > 0, "learning_rate", "a number above 0")
        expect(self.warmup_steps >= 0, "warmup_steps", "0 or more")
        expect(0 <= self.final_fraction <= 1, "final_fraction", "a part of the peak, from 0 to 1")
        expect(0 < self.decay_fraction <= 1, "decay_fraction", "a part of the steps, above 0 and up to 1")
        expect(self.weight_decay is None or self.weight_decay >= 0, "weight_decay", "0 or more, or null")
        expect(self.clip_norm is None or self.clip_norm > 0, "clip_norm", "a number above 0, or null")
        expect(self.ema is None or 0 < self.ema < 1, "ema", "a decay between 0 and 1, such as 0.999, or null")
