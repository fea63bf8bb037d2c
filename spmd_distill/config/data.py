"""Settings of what is trained and evaluated on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataConfig:
    """Text, cut into rows of ``length`` tokens."""

    train: tuple[str, ...] = ("demo",)
    """Text files, folders of them, or ``demo``: Shakespeare's plays and Python's own documentation."""
    heldout: tuple[str, ...] = ()
    """The same for evaluation; empty splits off a tenth of the training documents by name."""
    length: int = 128
    rows: int = 4
    """Rows of a micro-batch, over all devices."""
    micro_batches: int = 1
    """Micro-batches an optimizer step; their gradients are summed exactly."""
    max_train_tokens: int | None = None
    """Tokenise no more than about this many tokens of training text."""
