"""The launcher alone, with small programs in place of `spmd-distill`: who dies, who is started again, what is said."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmd_distill import launcher
from spmd_distill.cli import main
from spmd_distill.launcher import Group, Launcher, environment, held_port

HEAD = "import os, signal, sys, time; from pathlib import Path; me = int(os.environ['SPMD_DISTILL_PROCESS_ID'])\n"

running: list[Launcher] = []


def launch(program: str, *, restarts: int = 2, arguments: tuple[str, ...] = ()) -> tuple[int, list[str], int]:
    """The exit code of a group of three, what it said, and how often it was started."""
    said, starts = [], []

    def command() -> tuple[str, ...]:
        starts.append(time.monotonic())
        return arguments

    group = Group(3, 2, restarts, backoff=0.01, program=(sys.executable, "-c", HEAD + program))
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    running.append(Launcher(group, said.append))
    code = running[-1].run(command)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    return code, said, len(starts)


def test_all_that_is_said_comes_with_its_number():
    code, said, starts = launch(
        "print('out', me); print('err', me, file=sys.stderr); print('[Gloo] Rank 1 is connected to 1')"
    )
    assert (code, starts) == (0, 1)
    assert sorted(said) == sorted(f"[{i}] {what} {i}" for i in range(3) for what in ("out", "err"))


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("sys.exit(3)", 3, "process 1 ended with code 3"),
        ("os.kill(os.getpid(), 9)", 137, "process 1 was killed by SIGKILL"),
    ],
)
def test_it_gives_up_after_its_restarts(how, code, words, monkeypatch):
    monkeypatch.setattr(launcher, "_GRACE", 0.1)  # the others sleep
    found, said, starts = launch(f"{how} if me == 1 else time.sleep(60)")
    assert (found, starts) == (code, 3)
    assert said[0] == f"launch: {words}; all are killed, restart 1 of 2 in 0.01 s"
    assert said[-1] == f"launch: {words}; given up after 2 restart(s)"


def test_it_goes_on_after_a_death(tmp_path):
    program = """
folder = Path(sys.argv[1])
mark = folder / "died"
if not mark.exists():
    (folder / str(me)).touch()
    if me == 2:
        while len(list(folder.iterdir())) < 3:  # a late one would take this start for the second
            time.sleep(0.01)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
print("done")
"""
    code, said, starts = launch(program, arguments=(str(tmp_path),))
    assert (code, starts) == (0, 2)
    assert sorted(said[1:]) == ["[0] done", "[1] done", "[2] done"]


@pytest.mark.parametrize("others", ["sys.exit(1)", "os.abort()"])
def test_who_was_killed_is_named_and_not_who_found_it_gone(others, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_GRACE", 60.0)  # all end by themselves, however slow this machine is
    program = f"""
folder = Path(sys.argv[1])
(folder / str(me)).touch()
while len(list(folder.iterdir())) < 3:
    time.sleep(0.01)
if me == 1:
    time.sleep(0.2)  # the others are seen first
    os.kill(os.getpid(), signal.SIGKILL)
{others}
"""
    code, said, _ = launch(program, arguments=(str(tmp_path),), restarts=0)
    assert (code, said) == (137, ["launch: process 1 was killed by SIGKILL; given up after 0 restart(s)"])


def test_a_mistake_is_said_once_and_not_repeated():
    code, said, starts = launch("print('spmd-distill: error: no such file', file=sys.stderr); os._exit(2)")
    assert (code, said, starts) == (2, ["spmd-distill: error: no such file"], 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_handed_on_and_all_end_well(number, tmp_path):
    program = f"""
def save(number, frame):
    print("saved after", signal.Signals(number).name)
    sys.exit(0)
signal.signal({int(number)}, save)
(Path(sys.argv[1]) / str(me)).touch()
time.sleep(60)
"""
    threading.Thread(target=_signal_once_all_are_there, args=(tmp_path, number, 1)).start()
    code, said, starts = launch(program, arguments=(str(tmp_path),))
    assert (code, starts) == (0, 1)
    assert sorted(said) == [f"[{i}] saved after {number.name}" for i in range(3)]


def test_a_second_signal_kills(tmp_path):
    program = """
me = Path(sys.argv[1]) / str(me)
signal.signal(15, lambda *_: me.with_suffix(".told").touch())
me.touch()
while True:
    time.sleep(60)
"""
    threading.Thread(target=_signal_once_all_are_there, args=(tmp_path, signal.SIGTERM, 2)).start()
    code, _, starts = launch(program, arguments=(str(tmp_path),))
    assert (code, starts) == (137, 1)


def _signal_once_all_are_there(folder: Path, number: int, times: int) -> None:
    for time_ in range(times):
        # all have begun, and the launcher knows; all were told of the first one
        while len(list(folder.iterdir())) < 3 + 3 * time_ or running[-1]._starting:
            time.sleep(0.01)
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("started", range(4))
def test_a_signal_while_the_group_is_started_ends_all(started, number, monkeypatch):
    """Before the first process, between two, and after the last, before the launcher has noted that it is there."""
    children = []

    class Signalled(subprocess.Popen):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            children.append(self)
            if len(children) == started:
                os.kill(os.getpid(), number)

    def command() -> tuple[str, ...]:
        if started == 0:
            os.kill(os.getpid(), number)
        return ()

    monkeypatch.setattr(subprocess, "Popen", Signalled)
    program = (sys.executable, "-c", "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(30)")
    code = Launcher(Group(3, 2, 2, program=program), lambda line: None).run(command)
    assert (code, len(children)) == (128 + number, started)
    assert [child.returncode for child in children] == [-signal.SIGKILL] * started


def test_a_port_that_is_held_is_given_to_nobody_else_and_can_be_listened_at():
    with held_port() as port:
        for address in ("", "127.0.0.1"):
            with socket.create_server((address, port)) as server, socket.create_connection(("127.0.0.1", port)) as one:
                server.accept()[0].close()
                one.close()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_stays_behind_a_launcher_that_is_killed(tmp_path):
    program = HEAD + (
        "from spmd_distill.launcher import end_with_launcher; end_with_launcher()\n"
        "(Path(sys.argv[1]) / str(os.getpid())).touch(); time.sleep(60)"
    )
    script = (
        "import sys; from spmd_distill.launcher import Group, Launcher\n"
        f"Launcher(Group(2, 1, program=(sys.executable, '-c', {program!r}))).run(lambda: [{str(tmp_path)!r}])"
    )
    path = os.pathsep.join(sys.path)
    parent = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path})
    while len(list(tmp_path.iterdir())) < 2:
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and any(_runs(int(p.name)) for p in tmp_path.iterdir()):
        time.sleep(0.05)
    assert not any(_runs(int(p.name)) for p in tmp_path.iterdir())


def _runs(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_each_process_knows_its_place():
    given = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --other=1", "PATH": "x"}
    found = environment(Group(2, 4, heartbeat=7), 1, 4711, given)
    assert found["XLA_FLAGS"].split()[:2] == ["--other=1", "--xla_force_host_platform_device_count=4"]
    names = ("COORDINATOR", "PROCESSES", "PROCESS_ID", "HEARTBEAT")
    assert [found[f"SPMD_DISTILL_{name}"] for name in names] == ["127.0.0.1:4711", "2", "1", "7"]
    assert found["PATH"] == "x"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["-n", "0", "train", "x.yaml"], "--processes is 0; it must be at least 1"),
        (["--max-restarts", "-1", "train", "x.yaml"], "--max-restarts is -1; it must be at least 0"),
        (["-n", "2"], "launch takes a command, train or demo, after its own options; found nothing"),
        (["verify"], "found 'verify'"),
        (["train", "missing.yaml"], "missing.yaml"),
        (["train"], "train takes a run file"),
    ],
)
def test_mistakes_are_found_before_anything_is_started(given, words, capfd):
    assert main(["launch", *given]) == 2
    found = capfd.readouterr()
    assert found.err.count("\n") == 1 and words in found.err and not found.out
