"""Settings of what surrounds the training steps: evaluation, checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out text, before, every so many steps, and after."""

    every: int = 100
    rows: int = 32
    """Held-out rows that are scored each time."""
    prompts: tuple[str, ...] = (
        "The capital of France is",
        "To be, or not to be, that is",
        "In Python, a list comprehension is",
    )
    """Continued by teacher and student at the end."""
    new_tokens: int = 24


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of student, optimizer and data position."""

    every: int = 100
    keep: int = 3
