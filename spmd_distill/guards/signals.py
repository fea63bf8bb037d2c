"""What stops a run without losing it: a signal waits for the step in progress, and ends anything else at once.

Three places ask a run to stop: Ctrl-C, SIGTERM (what schedulers send before they kill), and in a run of several
processes jax's preemption service. That service takes SIGTERM for itself, tells every process, and names one step
at which all of them stop; a SIGINT is handed on to it, since one process must not leave a collective alone.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import orbax.checkpoint as ocp

__all__ = ["Interrupted", "StopSignal", "leave_at_second_interrupt"]


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, and did; the message says by what, where, and how to go on."""

    def __init__(self, message: str, code: int = 130):
        super().__init__(message)
        self.code = code
        """The command's exit code: 0 where the run can go on, else that of a program that the signal ends."""


class StopSignal:
    """While entered, SIGINT and SIGTERM raise `Interrupted` in the main thread, or wait where the run says `hold`.

    A second SIGINT raises KeyboardInterrupt wherever the run is. Python delivers signals in the main thread only;
    entered in another thread, it does nothing.
    """

    def __init__(self):
        self.requested: str | None = None
        """The name of the signal that came, if one did."""
        self._number = signal.SIGINT
        self._held = False
        self._alone, self._agreed = True, False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        service = bool(getattr(jax.config, "jax_enable_preemption_service", False))
        self._agreed = jax.distributed.is_initialized() and service
        self._alone = jax.process_count() == 1 and not self._agreed
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT,) if self._agreed else (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, a signal only sets `requested`: whoever holds asks `reached` where the run may stop."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Inside a `hold`, a part that may be broken off anywhere. Raises `Interrupted` if a signal waits already."""
        before, self._held = self._held, False
        try:
            self.check()
            yield
            self.check()  # an exception raised while Python collects garbage is lost
        finally:
            self._held = before

    def check(self) -> None:
        """Raise `Interrupted` where a signal has come and none is held. In a run of several processes do nothing."""
        if self.requested is not None and not self._held and self._alone:
            raise self.interrupted()

    def reached(self, step: int) -> bool:
        """Whether the run is to stop after ``step`` optimizer steps: asked once a step, by all processes alike."""
        if self._agreed and ocp.multihost.reached_preemption(step):
            self.requested = self.requested or "a preemption notice"
        elif self._agreed:
            return False  # jax names the step
        return self.requested is not None

    def interrupted(self, where: str = "") -> Interrupted:
        """The exception that says so."""
        return Interrupted(f"Stopped by {self.requested}{where}", 128 + self._number)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.requested is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.requested, self._number = signal.Signals(number).name, signal.Signals(number)
        if self._agreed:
            os.kill(os.getpid(), signal.SIGTERM)
        self.check()


@contextlib.contextmanager
def leave_at_second_interrupt(said: str = "") -> Iterator[None]:
    """For a command: a SIGINT after a first signal ends the process at once, with exit code 130.

    Python's own handlers wait while C code runs, and compiling is minutes of it; here a thread reads the signals as
    they come. It prints ``said`` after the first one. Only in the main thread; elsewhere it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reader, said), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()


def _watch(reader: socket.socket, said: str) -> None:
    stopping = False
    while numbers := reader.recv(64):
        for number in numbers:
            if stopping and number == signal.SIGINT:
                shown = "\x1b[?25h" if sys.stderr.isatty() else ""  # the cursor, which a live display hides
                os.write(2, f"{shown}\nspmd-distill: interrupted\n".encode())
                os._exit(130)
            if not stopping and number in (signal.SIGINT, signal.SIGTERM):
                stopping = True
                os.write(2, f"\n{said}\n".encode() if said else b"")
