"""What stops a run without losing it: a signal is remembered until the step in progress is done."""

import signal
import threading
from types import FrameType
from typing import Any


class StopSignal:
    """While entered, SIGINT and SIGTERM only set `requested`; a second SIGINT interrupts at once.

    Python delivers signals in the main thread only; entered in another thread, it does nothing.
    """

    def __init__(self):
        self.requested: str | None = None
        """The name of the signal that came, if one did."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
