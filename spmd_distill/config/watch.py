"""Settings of what surrounds the training steps: evaluation, checkpoints."""

from dataclasses import dataclass
from typing import Literal

from spmd_distill.errors import UserError

Best = Literal["kl", "kl_reverse", "ce_student", "loss", "top1", "acceptance"]
"""Metrics on held-out text; of the last two more is better, of the others less."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out text, before, every so many steps, and after."""

    every: int = 100
    """Optimizer steps between two evaluations; the last step always has one."""
    rows: int = 32
    """Held-out rows that are scored each time."""
    prompts: tuple[str, ...] = (
        "The capital of France is",
        "To be, or not to be, that is",
        "In Python, a list comprehension is",
    )
    """Continued by teacher and student, greedily: at evaluations and at the end."""
    new_tokens: int = 24
    """Tokens that each prompt is continued by, at most."""
    samples: bool = True
    """Whether prompts are continued at evaluations, into samples.jsonl and TensorBoard."""
    samples_every: int = 1
    """At which evaluations: 1 is every one, 2 every second one."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of student, optimizer and data position."""

    every: int = 100
    """Optimizer steps between two of them; the last step always has one."""
    keep: int = 3
    """So many of the newest stay."""
    keep_every: int | None = None
    """Steps that this number divides stay for good, of those that have a checkpoint."""
    best: Best | None = None
    """The metric on held-out text by which the best step so far stays too; it is then saved when it is evaluated."""
    export: Literal["last", "best"] = "last"
    """Which step's student is exported at the end."""

    def check(self) -> None:
        """Raise `UserError` for what no type can say."""
        if self.keep_every is not None and self.keep_every < 1:
            raise UserError(f"Run file: checkpoint.keep_every is {self.keep_every}; it must be at least 1, or null.")
        if self.keep_every is not None and self.keep_every % self.every:
            raise UserError(
                f"Run file: checkpoint.keep_every is {self.keep_every}, of which checkpoint.every, {self.every}, is no "
                f"divisor: few of those steps have a checkpoint. Take a multiple of {self.every}."
            )
        if self.export == "best" and self.best is None:
            raise UserError("Run file: checkpoint.export is best, but nothing says by what; set checkpoint.best.")
