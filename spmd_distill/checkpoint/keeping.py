"""Which steps stay: the newest few, every so many for good, and the best one."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

MARK = "best.json"
"""In the folder of a step that was the best so far when it was saved. It is committed with the step, so the best step
is the newest one with a mark, wherever the run was killed."""


HIGHER_IS_BETTER = ("top1", "acceptance")
"""Metrics of held-out text of which more is better; of all others, less."""


class Mark(NamedTuple):
    """Why a step is the best so far."""

    metric: str
    value: float

    def beats(self, other: "Mark | None") -> bool:
        """Whether this is strictly better than the other, by the same metric; NaN is not, and anything beats None."""
        if math.isnan(self.value) or other is None or other.metric != self.metric:
            return not math.isnan(self.value)
        return self.value > other.value if self.metric in HIGHER_IS_BETTER else self.value < other.value

    def write(self, folder: Path) -> None:
        """Put the mark into a step's folder."""
        draft = folder / f".{MARK}.tmp"
        draft.write_text(json.dumps(self._asdict()) + "\n")
        os.replace(draft, folder / MARK)


class Keeping:
    """orbax's `PreservationPolicy` of a run; ``best`` moves while it trains."""

    def __init__(self, newest: int | None, every: int | None):
        """Keep the ``newest`` steps (None: all), and for good those that ``every`` divides (None: none)."""
        self.newest, self.every = newest, every
        self.best: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """For each of the ``checkpoints``, oldest first, whether it stays."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        newest = steps if self.newest is None else steps[-self.newest :]
        divided = [step for step in steps if self.every is not None and step % self.every == 0]
        return [step in newest or step in divided or step == self.best for step in steps]
