"""Who is there: a roll call at process 0's port, before JAX takes that port over.

Where a process does not come, or two have come under one number, JAX ends those that have with SIGABRT and a stack
trace, minutes later. Here process 0 listens first; every other one connects, says which it is, and waits for the
answer, which is the same for all: go on, or a sentence about what is wrong.
"""

import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from spmd_distill.errors import UserError

_MAGIC = "spmd_distill roll call"
_LINE = 4096
"""Bytes of the longest line that is listened to."""
_GRACE = 10.0
"""Seconds that an answer may take longer than process 0 waits for the others."""


@dataclass(frozen=True)
class _Hello:
    """What a process says of itself."""

    number: int
    processes: int
    host: str = field(default_factory=socket.gethostname)
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def line(self) -> bytes:
        return f"{json.dumps({'magic': _MAGIC, **asdict(self)})}\n".encode()

    @classmethod
    def read(cls, line: bytes) -> "_Hello | None":
        """None for what is none."""
        try:
            found = json.loads(line)
            if found.pop("magic") != _MAGIC:
                return None
            return cls(int(found["number"]), int(found["processes"]), str(found["host"]), str(found["token"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def roll_call(coordinator: str, processes: int, number: int, seconds: float, listen: str = "") -> None:
    """Wait until all processes of a group have come, each under a number of its own.

    Args:
        coordinator: ``host:port`` of process 0.
        processes: how many there are.
        number: which of them this is, from 0.
        seconds: how long to wait.
        listen: the address that process 0 listens at; all of its machine where empty.

    Raises:
        UserError: on every process that can be told: one is missing, two have one number, or they were told of groups
            of different sizes; process 0 cannot be reached; its port is taken.
    """
    host, _, port = coordinator.rpartition(":")
    address, hello = (host.strip("[]"), int(port)), _Hello(number, processes)
    mistake = _preside(address, hello, seconds, listen) if number == 0 else _report(address, hello, seconds)
    if mistake:
        raise UserError(mistake)


def _preside(address: tuple[str, int], me: _Hello, seconds: float, listen: str) -> str:
    """As process 0: hear who comes, and tell all of them what is wrong, or that nothing is."""
    came: dict[socket.socket, _Hello] = {}
    elsewhere, over = list[str](), threading.Event()
    try:
        with _listening(address[1], listen) as server:
            threading.Thread(target=_look_elsewhere, args=(address, me, seconds, elsewhere, over), daemon=True).start()
            mistake = _hear(server, me, came, elsewhere, time.monotonic() + seconds)
        # nothing listens any more: whoever is told to go on finds JAX at the port, or nobody yet
        for connection in came:
            _say(connection, mistake)
    finally:
        over.set()
        for connection in came:
            connection.close()
    return mistake


def _hear(
    server: socket.socket, me: _Hello, came: dict[socket.socket, _Hello], elsewhere: list[str], until: float
) -> str:
    """Fill ``came`` until all are there; what is wrong, or an empty text."""
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as strangers:
        waiting.register(server, selectors.EVENT_READ)
        while len(came) < me.processes - 1:
            if elsewhere:
                return elsewhere[0]
            if time.monotonic() > until:
                return _missing(me, came)
            for key, _ in waiting.select(0.1):
                connection: Any = key.fileobj
                if connection is server:
                    connection, _ = server.accept()
                    connection.settimeout(1.0)  # a line comes in one piece, or from a stranger
                    waiting.register(connection, selectors.EVENT_READ)
                    strangers.callback(lambda one=connection: one in came or one.close())
                    continue
                hello = _heard(connection)
                if hello is None or hello.token == me.token:  # a stranger, one that has gone, or this very process
                    if hello is not None:
                        _say(connection, "")
                    came.pop(connection, None)
                    waiting.unregister(connection)
                    connection.close()
                    continue
                mistake = _mistake(me, hello, list(came.values()))
                came[connection] = hello
                if mistake:
                    return mistake
    return ""


def _heard(connection: socket.socket) -> _Hello | None:
    try:
        return _Hello.read(connection.recv(_LINE))
    except OSError:
        return None


def _mistake(me: _Hello, hello: _Hello, came: list[_Hello]) -> str:
    if hello.processes != me.processes:
        return (
            f"Process {hello.number} on {hello.host} was told of {hello.processes} processes, and process 0 on "
            f"{me.host} of {me.processes}. Give all of them the same distributed.processes."
        )
    twin = next((other for other in [me, *came] if other.number == hello.number), None)
    if twin is not None:
        where = f"both on {me.host}" if twin.host == hello.host else f"on {twin.host} and on {hello.host}"
        return (
            f"Two processes have number {hello.number}, {where}. Give each its own distributed.process_id, from 0 to "
            f"{me.processes - 1}."
        )
    return ""


def _missing(me: _Hello, came: dict[socket.socket, _Hello]) -> str:
    there = {hello.number for hello in came.values()}
    missing = [number for number in range(1, me.processes) if number not in there]
    shown = ", ".join(map(str, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    return (
        f"Of {me.processes} processes, {len(came) + 1} came together in time; not there: number {shown}. Start each, "
        f"with a distributed.process_id of its own, where it can reach process 0 on {me.host}, or wait longer "
        f"(distributed.timeout)."
    )


def _report(address: tuple[str, int], me: _Hello, seconds: float, over: threading.Event | None = None) -> str:
    """Say hello to process 0, as soon as it is there, and return its answer. Raises `UserError` where none comes."""
    until, why = time.monotonic() + seconds, "no answer"
    while True:
        try:
            with socket.create_connection(address, timeout=5) as connection:
                connection.sendall(me.line())
                connection.settimeout(seconds + _GRACE)
                with connection.makefile("rb") as answers:
                    answer = answers.readline(_LINE).decode(errors="replace")
                if answer.startswith(_MAGIC) and answer.endswith("\n"):
                    return answer.removeprefix(_MAGIC).strip()
                why = "what listens there is not process 0, or it ended"
        except OSError as error:
            why = str(error.strerror or error)
        if time.monotonic() > until or (over is not None and over.is_set()):
            raise UserError(
                f"Process 0 cannot be reached at {address[0]}:{address[1]} within {seconds:g} s ({why}). Is it running "
                f"there, and is the port open?"
            )
        time.sleep(0.2)


def _look_elsewhere(
    address: tuple[str, int], me: _Hello, seconds: float, found: list[str], over: threading.Event
) -> None:
    """As process 0: knock at the address that the others know. Another process that has number 0 would answer."""
    with contextlib.suppress(UserError):  # some networks lead no host to its own outer address
        if answer := _report(address, me, seconds, over):
            found.append(answer)


def _say(connection: socket.socket, mistake: str) -> None:
    with contextlib.suppress(OSError):  # gone meanwhile
        connection.sendall(f"{_MAGIC} {mistake}\n".encode())


@contextlib.contextmanager
def _listening(port: int, listen: str) -> Iterator[socket.socket]:
    """A server at the port. Raises `UserError` where it is taken."""
    try:
        try:
            if listen:
                raise OSError
            server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except (OSError, ValueError):  # no IPv6 here, or the port is taken
            server = socket.create_server((listen, port), backlog=1024)
    except OSError as error:
        raise UserError(
            f"Port {port} of distributed.coordinator cannot be listened at ({error.strerror}). Take another port, "
            f"or end what uses it; of a group, only one process may have number 0."
        ) from error
    with server:
        yield server
