"""A group of processes on this machine: started, relayed, watched, and started again where one of them dies.

A process of a group that dies leaves the others in a collective that never ends, and nothing inside them can mend
that. So the mending is done from outside, with what every process understands: SIGKILL for all, and a new group that
goes on from the run folder.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

USER_MISTAKE = 2
"""The exit code of what only the user can mend."""
COMMAND = "spmd-distill: "
"""How the line begins that a command ends with where it is not done."""
MISTAKE = f"{COMMAND}error: "
_CHATTER = re.compile(r"\[Gloo\] Rank \d+ is connected to")
_POLL, _GRACE = 0.05, 2.0
_LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class Group:
    """What a group consists of."""

    processes: int
    devices: int
    """CPU devices that each process simulates."""
    max_restarts: int = 3
    heartbeat: int = 30
    """Seconds of silence after which a process that has not ended counts as dead."""
    backoff: float = 1.0
    """Seconds before the first restart; doubled for each further one."""
    program: tuple[str, ...] = (sys.executable, "-m", "spmd_distill")


class Launcher:
    """Runs one command as a group until it is done, stopped, or given up."""

    def __init__(self, group: Group, write: Callable[[str], None] | None = None):
        self.group = group
        self._write = write or _to_stderr
        self._lock = threading.Lock()
        self._children: list[subprocess.Popen[bytes]] = []
        self._said: set[str] = set()
        self._starting, self._missed = False, False
        self._stopping, self._asked = 0, 0

    def run(self, command: Callable[[], Sequence[str]]) -> int:
        """Start the group, again where it fails, until it ends well; return the exit code.

        ``command`` is asked before each start: the arguments of ``spmd-distill``. SIGINT and SIGTERM are handed on to
        all processes, which save and end; a second one kills them. One that comes while they are being started kills
        those that are there: they have done nothing yet.
        """
        before = {n: signal.signal(n, self._hand_on) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            for attempt in range(self.group.max_restarts + 1):
                code, what = self._once(command())
                if code in (0, USER_MISTAKE) or self._stopping:
                    return code
                if attempt == self.group.max_restarts:
                    self._write(f"launch: {what}; given up after {attempt} restart(s)")
                    return code
                pause = min(self.group.backoff * 2**attempt, _LONGEST_PAUSE)
                self._write(
                    f"launch: {what}; all are killed, restart {attempt + 1} of {self.group.max_restarts} in {pause:g} s"
                )
                if self._pause(pause):
                    return code
            raise AssertionError("unreachable")
        finally:
            self._kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _once(self, arguments: Sequence[str]) -> tuple[int, str]:
        """One life of the group: its exit code, and what happened, in words."""
        self._starting, relays = True, []
        with held_port() as port:
            for number in range(self.group.processes):
                if self._stopping:
                    break
                child = subprocess.Popen(
                    [*self.group.program, *arguments],
                    env=environment(self.group, number, port, os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # the terminal's Ctrl-C reaches the launcher alone, which hands it on
                )
                self._children.append(child)
                relays.append(threading.Thread(target=self._relay, args=(number, child.stdout), daemon=True))
                relays[-1].start()
            self._starting = False
            begun = not (self._stopping and not self._children) and not self._missed
            failed = self._wait() if begun else None
            self._kill()
        for relay in relays:
            relay.join(timeout=5)  # a grandchild may hold the pipe
        codes = [child.returncode for child in self._children]
        self._children = []
        if not begun:
            return 128 + self._asked, "stopped before it had begun"
        if failed is None:
            return 0, "all processes ended"
        if USER_MISTAKE in codes:
            return USER_MISTAKE, "a mistake"
        code = codes[failed]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return code if code > 0 else 128 - code, f"process {failed} {how}"

    def _wait(self) -> int | None:
        """Wait until all have ended well (None), or one has not (its number); the others then have a moment."""
        while True:
            codes = [child.poll() for child in self._children]
            if any(codes):
                deadline = time.monotonic() + _GRACE
                while time.monotonic() < deadline and any(child.poll() is None for child in self._children):
                    time.sleep(_POLL)
                return min(range(len(codes)), key=lambda i: (_likely(self._children[i].poll()), not codes[i]))
            if None not in codes:
                return None
            time.sleep(_POLL)

    def _relay(self, number: int, stream: IO[bytes] | None) -> None:
        assert stream is not None
        with stream:
            self._relay_lines(number, stream)

    def _relay_lines(self, number: int, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\r\n")
            if _CHATTER.match(text):
                continue
            if text.startswith(COMMAND):  # what the command itself ends with, which all processes say alike
                with self._lock:
                    known, _ = text in self._said, self._said.add(text)
                if not known:
                    self._write(text)
            else:
                self._write(f"[{number}] {text}")

    def _hand_on(self, number: int, _: FrameType | None) -> None:
        self._stopping, self._asked = self._stopping + 1, self._asked or number
        self._missed = self._missed or self._starting  # nobody is told
        for child in self._children:
            if not self._starting and child.poll() is None:
                child.send_signal(number if self._stopping == 1 else signal.SIGKILL)

    def _kill(self) -> None:
        """Kill every process, and what it started; wait for them."""
        for child in self._children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    def _pause(self, seconds: float) -> bool:
        """Wait; whether a signal to stop came."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stopping:
            time.sleep(_POLL)
        return self._stopping > 0


def environment(group: Group, number: int, port: int, given: Mapping[str, str]) -> dict[str, str]:
    """What process ``number`` of a group finds in its environment."""
    flags = [flag for flag in given.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={group.devices}")
    # Devices of one process wait for each other while one of them waits for another process, which may be slow.
    for name, seconds in (("warn_stuck", 120), ("terminate", 600)):
        if f"collective_call_{name}" not in given.get("XLA_FLAGS", ""):
            flags.append(f"--xla_cpu_collective_call_{name}_timeout_seconds={seconds}")
    return {
        **given,
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": given.get("COLUMNS", "100"),
        "SPMD_DISTILL_COORDINATOR": f"127.0.0.1:{port}",
        "SPMD_DISTILL_PROCESSES": str(group.processes),
        "SPMD_DISTILL_PROCESS_ID": str(number),
        "SPMD_DISTILL_HEARTBEAT": str(group.heartbeat),
        "SPMD_DISTILL_LAUNCHER": str(os.getpid()),
    }


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """In a process that a launcher started: end when it ends, however it does."""
    if not environ.get("SPMD_DISTILL_LAUNCHER", "").isdecimal():
        return
    launcher = int(environ["SPMD_DISTILL_LAUNCHER"])
    if sys.platform == "linux":
        import ctypes

        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:  # it has ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.platform != "linux":
        threading.Thread(target=_watch, args=(launcher,), daemon=True).start()


def _likely(code: int | None) -> int:
    """How likely a process with this exit code is the one that failed first; 0: most.

    What is killed may take longer to end than the others need to find it gone: they fail, or JAX aborts them.
    """
    if code is None or code == 0:
        return 3
    return 2 if code == -signal.SIGABRT else 1 if code > 0 else 0


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that the system gives to no other program meanwhile; whoever is told of it can listen there.

    Bound and not listened at: with SO_REUSEADDR at both ends, Linux lets another process listen. Where a system does
    not, the port is let go of, and is free in all likelihood.
    """
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        try:
            socket.create_server(("", port)).close()
        except OSError:
            one.close()
        yield port


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
