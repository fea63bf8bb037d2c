"""How fast the steps go: tokens and operations a second, the share of what the devices could do, the wait for data.

    tokens_per_second  = valid tokens / seconds
    flops_per_second   = steps x model operations of a step / seconds      (`program.step_flops`, over all devices)
    mfu                = flops_per_second / (devices x peak of a device)   (`program.published_peak`)
    data_wait          = seconds that the loop waited for batches / seconds

Seconds are those of the wall clock, from one line to the next, with everything that the loop does for a step; those of
evaluations and checkpoints are left out, and so is the first step of a session, which warms up.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CLOCKED = ("tokens_per_second", "flops_per_second", "mfu", "data_wait")
"""Metrics that come from a clock: two runs of the same numbers differ in them."""


@dataclass(frozen=True)
class Work:
    """What a step asks for, and what the devices could do."""

    flops: float | None = None
    """Model operations of a step, over all devices; None where they cannot be counted."""
    peak: float | None = None
    """Operations a second of all devices together; None where no figure is known (a CPU, say)."""


class Meter:
    """The clock of the training steps. It runs from `start` to `stop`; each `lap` tells the rates since the last."""

    def __init__(self, work: Work = Work()):
        self._work = work
        self._began: float | None = None
        self._seconds = self._waited = 0.0
        self._tokens = self._steps = 0
        self._all_tokens, self._all_seconds = 0, 0.0

    def start(self) -> None:
        """Let the clock run, if it stands."""
        if self._began is None:
            self._began = time.monotonic()

    def stop(self) -> None:
        """Let the clock stand: what is done now is no training."""
        if self._began is not None:
            self._seconds += time.monotonic() - self._began
            self._began = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done inside is waiting for a batch."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - began

    def count(self, tokens: int) -> None:
        """One more step is done, with so many valid tokens."""
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens

    def restart(self) -> None:
        """Forget what was counted since the last lap: it does not tell how fast a step is."""
        running = self._began is not None
        self._began, self._seconds, self._waited, self._tokens, self._steps = None, 0.0, 0.0, 0, 0
        if running:
            self.start()

    def lap(self) -> dict[str, float]:
        """The rates since the last lap, by the names of ``metrics.jsonl``; empty where nothing was counted."""
        running = self._began is not None
        self.stop()
        seconds, found = self._seconds, dict[str, float]()
        if self._steps and seconds > 0:
            found["tokens_per_second"] = self._tokens / seconds
            if self._work.flops is not None:
                found["flops_per_second"] = self._steps * self._work.flops / seconds
                if self._work.peak:
                    found["mfu"] = found["flops_per_second"] / self._work.peak
            found["data_wait"] = min(self._waited / seconds, 1.0)
            self._all_tokens, self._all_seconds = self._all_tokens + self._tokens, self._all_seconds + seconds
        self.restart()
        if running:
            self.start()
        return found

    @property
    def tokens_per_second(self) -> float:
        """Valid tokens a second over all laps; 0 where there was none."""
        return self._all_tokens / self._all_seconds if self._all_seconds else 0.0
