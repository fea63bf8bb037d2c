"""The doctor on a machine: what is missing or odd is a finding with its fix, and a broken backend no traceback."""

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from spmd_distill.cli import main
from spmd_distill.doctor import Finding, worst
from spmd_distill.doctor.devices import check_devices, check_environment, probe
from spmd_distill.doctor.packages import OPTIONAL, check_packages, check_python, requirements
from spmd_distill.doctor.space import check_disk, check_memory
from spmd_distill.sharding import layout_names


def said(findings: Iterable[Finding]) -> str:
    return "\n".join(f"{f.status}: {f.about}: {f.found} {f.fix}" for f in findings)


def test_the_machine_that_runs_the_tests_has_what_the_library_asks_for():
    found = list(check_packages())
    assert worst(found) != "problem", said(found)
    names = {line.split(">")[0].split("[")[0] for line in requirements()}
    assert {"jax", "flax", "optax", "orbax-checkpoint"} <= names and "torch" not in names
    assert all(name in said(found) for name in names)
    assert "torch" not in OPTIONAL


@pytest.mark.parametrize(
    ("wanted", "finding"),
    [
        ("jax>=99", "problem: jax: is .*; expected >=99. pip install 'jax>=99'"),
        ("no-such-package>=1", "problem: no-such-package: is not installed. pip install 'no-such-package>=1'"),
        ("nothing>=1; python_version < '3'", ""),
        ("what is this", "note: what is this: is no requirement"),
    ],
)
def test_packages_that_do_not_fit_are_named(wanted, finding):

    found = said(f for f in check_packages([wanted]) if f.about not in ("jaxlib", "packages"))
    assert re.fullmatch(finding + ".*", found), found


@pytest.mark.parametrize(("version", "status"), [((3, 10, 9), "problem"), ((3, 11, 0), "ok"), ((3, 14, 1), "ok")])
def test_python(version, status):
    assert worst(check_python(version)) == status


ENVIRONMENTS = {
    "nothing set": ({}, ""),
    "devices simulated": ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, "note: XLA_FLAGS: has 4 devices"),
    "no number of devices": ({"XLA_FLAGS": "--xla_force_host_platform_device_count="}, ""),
    "devices that are none": (
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=many"}, "problem: XLA_FLAGS: .* is 'many'"
    ),
    "too few threads": ({"NPROC": "4"}, "problem: NPROC: is '4', with 8 simulated devices.*set it to 32"),
    "too few threads for more": (
        {"NPROC": "12", "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=16"},
        "note: XLA_FLAGS.*16 devices(.|\n)*problem: NPROC: is '12', with 16 .*set it to 64",
    ),
    "threads enough": ({"NPROC": "32"}, ""),
    "held to a platform": ({"JAX_PLATFORMS": "cpu"}, "note: JAX_PLATFORMS: holds jax to cpu"),
    "float64": ({"JAX_ENABLE_X64": "1"}, "note: JAX_ENABLE_X64: float64 is on"),
    "float64 off": ({"JAX_ENABLE_X64": "0"}, ""),
    "nothing compiled": ({"JAX_DISABLE_JIT": "true"}, "note: JAX_DISABLE_JIT"),
    "no GPU": ({"CUDA_VISIBLE_DEVICES": ""}, "note: CUDA_VISIBLE_DEVICES: hides every GPU"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_traps_of_the_environment(name):

    environ, finding = ENVIRONMENTS[name]
    found = said(check_environment(environ))
    assert re.match(finding, found) if finding else not found, found


def test_devices_and_the_layouts_that_fit():
    environ = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    found = {f.about: f for f in check_devices(environ)}
    assert found["devices"].found.startswith("4 x cpu") and found["layouts"].status == "ok"
    assert set(found["layouts"].found.split(": ")[1].rstrip(".").split(", ")) == set(layout_names(4))


@pytest.mark.parametrize(
    ("harm", "finding"),
    [
        ({"JAX_PLATFORMS": "abacus"}, "jax finds none: .*abacus"),
        ({"PYTHONPATH": "BROKEN"}, "jax finds none: ImportError: this jax is broken"),
        ({"PYTHONPATH": "CRASH"}, "jax finds none: its process was killed by signal 6"),
    ],
)
def test_a_broken_backend_is_a_finding(tmp_path, harm, finding):

    code = {"BROKEN": "raise ImportError('this jax is broken')", "CRASH": "import os; os.abort()"}
    if harm.get("PYTHONPATH") in code:
        (tmp_path / "jax.py").write_text(code[harm["PYTHONPATH"]])
        root = str(Path(__file__).parents[2])
        harm = {"PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    (found,) = check_devices({**os.environ, **harm})
    assert found.status == "problem" and re.match(finding, found.found), found


def test_a_backend_that_hangs_is_a_finding():
    assert "took more than 0 s" in probe(os.environ, timeout=0.01)


@pytest.mark.parametrize(("free", "status"), [(2**30, "note"), (2**40, "ok")])
def test_memory(free, status):
    assert worst(check_memory(free)) == status
    assert list(check_memory())


def test_disk(tmp_path):
    (tmp_path / "file").write_text("")
    for folder, wanted, finding in (
        (tmp_path / "new" / "below", 1, "ok: runs: "),
        (tmp_path, 2**60, "problem: runs: .* free; the demo takes"),
        (tmp_path / "file" / "below", 1, "problem: runs: .*file is a file; expected a folder. Elsewhere."),
    ):
        assert re.match(finding, said(check_disk("runs", folder, wanted, "Elsewhere.")))
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /sys, which nobody may write")
def test_a_disk_that_nobody_may_write_is_no_traceback():
    assert list(check_disk("runs", Path("/sys/kernel/runs"), 1, "Elsewhere."))


def test_the_command_says_all_of_it(capsys, monkeypatch, tmp_path):
    import spmd_distill.doctor.machine as machine

    monkeypatch.setattr(
        machine, "check_devices", lambda: [Finding("problem", "devices", "jax finds none.", "Mend it.")]
    )
    monkeypatch.setenv("SPMD_DISTILL_CACHE", str(tmp_path / "cache"))
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    about = {finding["about"] for finding in found["findings"]}
    assert not found["ok"] and {"Python", "packages", "devices", "memory", "cache", "runs", *OPTIONAL} <= about
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(machine, "check_devices", lambda: [])
    for check in ("check_environment", "check_disk"):
        monkeypatch.setattr(machine, check, lambda *_: [])
    assert main(["doctor"]) == 0
    assert "Ready." in capsys.readouterr().out
