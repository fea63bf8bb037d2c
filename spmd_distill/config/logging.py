"""Settings of what is shown and written while a run trains."""

from dataclasses import dataclass, field
from typing import Literal

from spmd_distill.errors import UserError


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases beside ``metrics.jsonl`` and TensorBoard; needs ``pip install wandb``."""

    project: str | None = None
    """The project that the run appears in; null leaves Weights & Biases alone."""
    name: str | None = None
    """The name it appears under; null takes that of the run folder."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` keeps everything in the run folder, for ``wandb sync`` later."""


@dataclass(frozen=True)
class LoggingConfig:
    """What is shown and written while a run trains."""

    every: int = 1
    """Steps a line of metrics.jsonl, whose values are averages over them. The numbers of all of them are fetched
    from the devices at once, so that more than 1 also means that guards see them that much later."""
    peak_tflops: float | None = None
    """TFLOP/s that one device can reach in the compute type, for the utilisation; null takes the published figure of
    the device where one is known."""
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def check(self) -> None:
        """Raise `UserError` for what no type can say."""
        if self.every < 1:
            raise UserError(f"Run file: logging.every is {self.every}; it must be at least 1.")
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise UserError(f"Run file: logging.peak_tflops is {self.peak_tflops}; it must be above 0, or null.")
        if self.wandb.project == "":
            raise UserError("Run file: logging.wandb.project is empty; expected the name of a project, or null.")
