"""The roll call of a group: whoever is missing, comes twice or counts differently is named, to all, in time."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from spmd_distill.cli import main
from spmd_distill.distributed import rollcall
from spmd_distill.distributed.rollcall import roll_call
from spmd_distill.errors import UserError
from spmd_distill.launcher import held_port

SECONDS = 120.0
"""How long a roll call waits that nobody shall be late for, however slow this machine is."""


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.fixture
def heard(monkeypatch) -> list[int]:
    """The numbers of the processes that process 0 has heard so far."""
    found, real = [], rollcall._mistake

    def mistake(me, hello, came):
        found.append(hello.number)
        return real(me, hello, came)

    monkeypatch.setattr(rollcall, "_mistake", mistake)
    return found


def time_is_up_after(heard: list[int], numbers: set[int], monkeypatch) -> None:
    """An hour passes as soon as these numbers have been heard."""
    clock = lambda: time.monotonic() + 3600 * (numbers <= {*heard})  # noqa: E731
    monkeypatch.setattr(rollcall, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))


@contextlib.contextmanager
def meanwhile(*calls: tuple, port: int) -> Iterator["Future[list[str]]"]:
    """Roll calls that wait while something else happens."""
    found: Future[list[str]] = Future()
    caller = threading.Thread(target=lambda: found.set_result(answers(*calls, port=port)))
    caller.start()
    yield found
    caller.join()


def connected(port: int) -> socket.socket:
    """A stranger's connection to whoever listens at the port, once somebody does."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        time.sleep(0.01)


def answers(*calls: tuple, port: int, seconds: float = SECONDS) -> list[str]:
    """What each of some roll calls at once ends with: (number, processes, more arguments); empty: go on."""

    def one(number: int, processes: int, listen: str = "") -> str:
        try:
            roll_call(f"127.0.0.1:{port}", processes, number, seconds, listen)
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(one, *call) for call in calls]]


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_all_come_and_the_port_is_free_again(processes, port):
    assert answers(*[(number, processes) for number in range(processes)], port=port) == [""] * processes
    socket.create_server(("", port)).close()


def test_who_is_missing_is_named_to_all_that_came(port, heard, monkeypatch):
    time_is_up_after(heard, {2}, monkeypatch)
    found = answers((0, 4), (2, 4), port=port)
    assert found[0] == found[1] and found[0].startswith(
        "Of 4 processes, 2 came together in time; not there: number 1, 3."
    )
    (alone,) = answers((0, 2), port=port, seconds=0.2)
    assert "not there: number 1." in alone


def test_two_of_one_number_are_named_to_all(port):
    host = socket.gethostname()
    found = answers((0, 3), (1, 3), (1, 3), port=port)
    fix = "Give each its own distributed.process_id, from 0 to 2."
    assert set(found) == {f"Two processes have number 1, both on {host}. {fix}"}


def test_two_that_are_number_0(port):
    one, two = answers((0, 2, "127.0.0.1"), (0, 2, "127.0.0.2"), port=port)  # as on two hosts
    assert one == two and one.startswith("Two processes have number 0, both on ")
    with meanwhile((0, 2), port=port) as first:
        connected(port).close()
        (taken,) = answers((0, 2), port=port)
        assert "cannot be listened at" in taken and "only one process may have number 0" in taken
        assert answers((1, 2), port=port) == [""]
    assert first.result() == [""]


def test_the_command_says_it_and_ends_with_2(tmp_path, port, monkeypatch, capsys):
    (tmp_path / "run.yaml").write_text(f"run: {tmp_path / 'run'}\n")
    at = {"COORDINATOR": f"127.0.0.1:{port}", "PROCESSES": "2", "PROCESS_ID": "0", "TIMEOUT": "1"}
    for name, value in at.items():
        monkeypatch.setenv(f"SPMD_DISTILL_{name}", value)
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("spmd-distill: error: Of 2 processes, 1 came together in time; not there: number 1.")
    assert said.count("\n") == 1 and not (tmp_path / "run").exists()


def test_groups_of_two_sizes(port):
    found = answers((0, 3), (1, 2), port=port)
    assert found[0] == found[1] and "Process 1 on" in found[0] and "was told of 2 processes, and process 0" in found[0]


def test_nobody_is_number_0(port):
    (found,) = answers((1, 2), port=port, seconds=0.3)
    assert "Process 0 cannot be reached at 127.0.0.1:" in found and "within 0.3 s (Connection refused)" in found


def test_something_else_listens_there():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"220 mail\r\n")

        threading.Thread(target=greet, daemon=True).start()
        (found,) = answers((1, 2), seconds=0.0, port=other.getsockname()[1])
    assert "what listens there is not process 0" in found


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"magic": 1}\n', b"[]\n", b"\xff\x00", b"x" * 9000])
def test_strangers_at_the_port_are_not_counted(said, port):
    with meanwhile((0, 2), port=port) as found:
        with connected(port) as stranger:
            stranger.sendall(said)
        assert answers((1, 2), port=port) == [""]
    assert found.result() == [""]


def test_one_that_died_and_comes_again_is_one(port, heard):
    code = "import sys; from spmd_distill.distributed.rollcall import roll_call; roll_call(sys.argv[1], 3, 1, 600)"
    with meanwhile((0, 3), port=port) as found:
        first = subprocess.Popen([sys.executable, "-c", code, f"127.0.0.1:{port}"])
        while 1 not in heard:
            assert first.poll() is None
            time.sleep(0.01)
        first.kill()
        first.wait()
        assert answers((1, 3), (2, 3), port=port) == ["", ""]
    assert found.result() == [""] and sorted(heard) == [1, 1, 2]
