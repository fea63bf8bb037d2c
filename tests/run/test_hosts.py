"""Runs by two processes of four devices each: the same numbers as one of eight, whatever is killed on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console
from tiny import tiny_run, train_until_first_checkpoint

from spmd_distill.build import set_up
from spmd_distill.checkpoint import Checkpoints
from spmd_distill.config import to_dict
from spmd_distill.metrics import CLOCKED, read_metrics
from spmd_distill.state import abstract_state
from spmd_distill.train import distil

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of a group in /proc")
NO_PROMPTS = ("--eval.prompts", "[]")
INSIDE = ("--objective.features", "[{feature: activation_maps, layers: best}]")


def launch(folder: Path, cache: Path, *flags: str, resume: bool = False) -> subprocess.Popen:
    """`spmd-distill launch` of the tiny run in ``folder``, its log in ``log``."""
    config = tiny_run(folder, *INSIDE, *flags)
    (folder / "run.yaml").write_text(yaml.safe_dump(to_dict(config)))
    command = ["train", *(["--resume", str(folder / "run"), *flags] if resume else [str(folder / "run.yaml")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "spmd_distill", "launch", "-n", "2", "--devices-per-process", "4", *command],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def ends(process: subprocess.Popen, folder: Path) -> tuple[int, str]:
    """Its exit code and log; killed where it does not end."""
    try:
        code = process.wait(timeout=1200)
    finally:
        process.kill()
    return code, (folder / "log").read_text()


def children(of: int) -> dict[int, int]:
    """The processes of a launcher's group: number -> process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            names = (path / "environ").read_bytes().split(b"\0") if parent == of else []
        except OSError:
            continue
        found |= {
            int(name.split(b"=")[1]): int(path.name) for name in names if name.startswith(b"SPMD_DISTILL_PROCESS_ID=")
        }
    return found


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 1200
    while not any(m.split == "train" and m.step >= step for m in read_metrics(folder / "run")):
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.01)


def trace(folder: Path) -> list[tuple]:
    """What was trained and evaluated, without what a clock says."""
    lines = read_metrics(folder / "run")
    return [(m.step, m.split, {k: v for k, v in m.values.items() if k not in CLOCKED}) for m in lines]


def assert_same_to_rounding(a: list[tuple], b: list[tuple]) -> None:
    assert [x[:2] for x in a] == [x[:2] for x in b]
    for (step, split, one), (_, _, two) in zip(a, b, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            np.testing.assert_allclose(value, two[name], rtol=1e-4, atol=1e-6, err_msg=f"{name} {split} {step}")


def arrays(folder: Path, step: int = 6) -> list[np.ndarray]:
    """Every array of a checkpoint, restored by this one process."""
    setup = set_up(tiny_run(folder))
    with Checkpoints(folder / "run" / "checkpoints", read_only=True) as checkpoints:
        state, _ = checkpoints.restore(step, abstract_state(setup.run, setup.tx))
    return jax.tree.leaves(jax.device_get(state))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run by one process of eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    distil(tiny_run(folder, *INSIDE, *NO_PROMPTS), console=Console(quiet=True))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def together(tmp_path_factory, cache) -> Path:
    """The run by two processes, undisturbed."""
    folder = tmp_path_factory.mktemp("together")
    code, log = ends(launch(folder, cache), folder)
    assert code == 0, log
    return folder


def test_two_processes_compute_what_one_does(alone, together):
    assert_same_to_rounding(trace(together), trace(alone))
    for one, two in zip(arrays(alone), arrays(together), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-5)


def test_a_group_finds_the_layers_that_one_process_does(alone, together):
    """And compares them: what the traces above hold of it is not 0."""
    mine, theirs = (json.loads((folder / "run" / "layers.json").read_text()) for folder in (together, alone))
    assert mine["activation_maps"]["pairs"] == theirs["activation_maps"]["pairs"]
    np.testing.assert_allclose(mine["activation_maps"]["cka"], theirs["activation_maps"]["cka"], rtol=1e-4)
    assert all(values["activation_maps"] > 0 for _, split, values in trace(together) if split == "train")


def test_process_0_alone_writes(together):
    log, run = (together / "log").read_text(), together / "run"
    assert "[0] step 6/6" in log and "[1] step" not in log
    assert len(list((run / "tensorboard").iterdir())) == 1
    assert {"config.yaml", "curves.png", "samples.json", "student", "summary.json"} <= {p.name for p in run.iterdir()}
    assert "coordinator: null" in (run / "config.yaml").read_text()  # where it ran is no setting of the run


def test_whoever_is_killed_the_group_goes_on_bit_for_bit(together, cache, tmp_path):
    process = launch(tmp_path, cache, *NO_PROMPTS)
    wait_for_step(tmp_path, 3, process)
    first = children(process.pid)
    os.kill(first[1], signal.SIGKILL)
    while children(process.pid).get(0) in (first[0], None):
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    wait_for_step(tmp_path, 5, process)
    os.kill(children(process.pid)[0], signal.SIGKILL)  # the coordinator
    code, log = ends(process, tmp_path)
    assert code == 0, log
    assert log.count("was killed by SIGKILL; all are killed, restart") == 2
    assert trace(tmp_path) == trace(together)
    for one, two in zip(arrays(together), arrays(tmp_path), strict=True):
        np.testing.assert_array_equal(one, two)


def test_two_processes_go_on_with_what_one_began_under_pmap_and_fsdp(alone, cache, tmp_path):
    flags = ("--mesh=fsdp2_tp4", "--mapper=pmap", "--eval.prompts=[]")
    train_until_first_checkpoint(tiny_run(tmp_path, *INSIDE, *flags))
    code, log = ends(launch(tmp_path, cache, *flags, resume=True), tmp_path)
    assert code == 0, log
    assert_same_to_rounding(trace(tmp_path), trace(alone))


def test_sigterm_to_the_launcher_saves_and_ends_all(cache, tmp_path):
    process = launch(tmp_path, cache, "--steps", "100000", "--eval.every", "100000", "--checkpoint.every", "100000")
    wait_for_step(tmp_path, 3, process)
    group = children(process.pid)
    process.terminate()
    code, log = ends(process, tmp_path)
    assert code in (0, 130), log  # saved, and said so
    assert log.count("spmd-distill: Stopped by SIGTERM at step") == 1
    last = read_metrics(tmp_path / "run")[-1].step
    assert [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()] == [last]
    assert len(group) == 2 and not any(Path(f"/proc/{number}").exists() for number in group.values())


def test_a_mistake_that_the_processes_find_is_said_once(cache, tmp_path):
    code, log = ends(launch(tmp_path, cache, "--mesh", "single"), tmp_path)
    assert (code, log.count("for 1 device(s), and the 2 processes have 8")) == (2, 1)
    assert "Traceback" not in log and "restart" not in log
    assert not (tmp_path / "run").exists()
