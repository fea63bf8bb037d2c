"""A library under test in a process of its own, which is told over stdin what to do next and answers in JSON lines.

Two libraries are compared by keeping both processes alive and letting them work in turn, so that whatever else the
machine does meets both. CPU seconds are those of the whole process, all threads: they depend far less on other jobs
than wall time does. Both ends are here; the child's end is used by workers in other environments, so this module needs
nothing but the standard library.
"""

import contextlib
import json
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Message = dict[str, Any]


class WorkerFailed(Exception):
    """A worker ended or fell silent; the message says how, in one line."""


class Worker:
    """The parent's end. Use as a context manager: leaving it ends the process."""

    def __init__(self, command: Sequence[str | Path], environ: dict[str, str] | None = None):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the worker)
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | (environ or {}),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ask(self, message: Message, timeout: float = 600.0) -> Message:
        """Send a message and wait for the answer. Raises `WorkerFailed`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; hearing nothing tells how
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        return self.hear(timeout)

    def hear(self, timeout: float = 600.0) -> Message:
        """Wait for the next message. Raises `WorkerFailed`."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise WorkerFailed(f"said nothing for {timeout:.0f} s") from None
        if not line:
            raise WorkerFailed(f"ended with code {self._process.wait()}: {self._last_error()}")
        return json.loads(line)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(timeout=5)
        self._errors.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        told = [line for line in lines if line and not line.startswith(("-----", "For simplicity, JAX has removed"))]
        return told[-1][:300] if told else "it said nothing"


class Channel:
    """The child's end. It takes over stdout: whatever a library prints there goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, message: Message) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def requests(self) -> Iterator[Message]:
        for line in sys.stdin:
            yield json.loads(line)


@contextlib.contextmanager
def stopwatch() -> Iterator[Message]:
    """Measure a block: seconds by the wall and of this process's CPU, written into what is yielded."""
    found: Message = {}
    wall, cpu = time.perf_counter(), time.process_time()
    yield found
    found |= {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def peak_rss() -> int:
    """The most memory this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int:
    """The memory of this process now, in bytes; where the system does not say it, the most it ever had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_rss()
