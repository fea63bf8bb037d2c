"""The run folder: a new run never lands on an old one, and no file in it is ever half written."""

import contextlib
import enum
import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from rich.console import Console
from tiny import tiny_run

from spmd_distill.environment import environment
from spmd_distill.errors import UserError
from spmd_distill.resuming import Session
from spmd_distill.runfolder import RunFolder
from spmd_distill.train import distil


class Colour(enum.Enum):
    RED = "red"


def test_create_then_open(tmp_path):
    run = RunFolder.create(tmp_path / "deep" / "run", {"steps": 10})
    again = RunFolder.open(str(tmp_path / "deep" / "run"))
    assert again.read_config() == {"steps": 10}
    where = {
        name: getattr(again, name).relative_to(again.path).as_posix()
        for name in ("config", "checkpoints", "student", "metrics", "curves")
    }
    assert where == {
        "config": "config.yaml",
        "checkpoints": "checkpoints",
        "student": "student",
        "metrics": "metrics.jsonl",
        "curves": "curves.png",
    }
    assert sorted(os.listdir(run)) == ["config.yaml"]


def test_create_takes_an_empty_folder_and_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert RunFolder.create("empty", {}).path == tmp_path / "empty"


def test_create_refuses_what_is_there_and_leaves_it_alone(tmp_path):
    RunFolder.create(tmp_path / "run", {"steps": 10})
    with pytest.raises(UserError, match=r"run: .* found config\.yaml; take --run OTHER, or resume"):
        RunFolder.create(tmp_path / "run", {})
    for number in range(8):
        (tmp_path / f"file{number}").write_text("mine")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UserError, match=r"found file0, file1, .*, file5 and 3 more; take --run OTHER$"):
        RunFolder.create(tmp_path, {})
    assert sorted(os.listdir(tmp_path)) == before


def test_create_where_a_file_is(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below" / "run"):
        with pytest.raises(UserError, match=f"run folder {path}: found a file at {tmp_path}/file, expected a folder"):
            RunFolder.create(path, {})
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /sys, which nobody may write")
def test_create_where_nobody_may_write():
    with pytest.raises(UserError, match=r"/sys/kernel/run: cannot write: .*; free some space, or take another --run"):
        RunFolder.create("/sys/kernel/run", {})


def test_create_in_a_folder_that_takes_no_files(tmp_path, monkeypatch):
    def refuse(*_, **named):
        raise OSError(30, "Read-only file system")

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"run/config\.yaml: cannot write: Read-only file system"):
        RunFolder.create(tmp_path / "run", {})


def test_urls_are_refused():
    for name in (lambda path: RunFolder.create(path, {}), RunFolder.open, RunFolder):
        with pytest.raises(UserError, match="gs://bucket/run: found a URL"):
            name("gs://bucket/run")


def test_open_what_is_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    for path, found in (("none", "nothing there"), ("file", "a file"), (".", "no config.yaml")):
        with pytest.raises(UserError, match=f"found {found}"):
            RunFolder.open(tmp_path / path)


def test_config_keeps_order_and_values(tmp_path):
    config = {
        "zeta": 1e-5,
        "alpha": {"betas": (0.9, np.float64(0.95)), "path": Path("a/b"), "colour": Colour.RED},
        "steps": np.int32(7),
        "scale": jnp.float32(0.5),
        "nothing": None,
        "name": "ünïcode: yes",
    }
    run = RunFolder.create(tmp_path / "run", {})
    run.write_config(config)
    text = run.config.read_text()
    assert [line.split(":")[0] for line in text.splitlines() if line[0] not in " -"] == list(config)
    assert (
        yaml.safe_load(text)
        == run.read_config()
        == {
            "zeta": 1e-5,
            "alpha": {"betas": [0.9, 0.95], "path": "a/b", "colour": "red"},
            "steps": 7,
            "scale": 0.5,
            "nothing": None,
            "name": "ünïcode: yes",
        }
    )
    with pytest.raises(TypeError, match=r"alpha\.betas\[1\]: object has no place"):
        run.write_config({"alpha": {"betas": [1, object()]}})
    assert run.config.read_text() == text


@pytest.mark.parametrize("text, said", [("a: [", "cannot be read"), ("- a", "found list"), ("", "found NoneType")])
def test_config_that_is_none(tmp_path, text, said):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        RunFolder.open(tmp_path).read_config()


def test_write_json(tmp_path):
    run = RunFolder.create(tmp_path / "run", {})
    run.write_json("results.json", {"kl": np.float32(0.5), "worse": [float("nan"), float("inf")], "n": 3})
    found = json.loads((run.path / "results.json").read_text(), parse_constant=pytest.fail)
    assert found == {"kl": 0.5, "worse": [None, None], "n": 3}
    run.write_json("results.json", [1])
    assert json.loads((run.path / "results.json").read_text()) == [1]
    assert sorted(os.listdir(run)) == ["config.yaml", "results.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path / "run", {})
    run.write_json("results.json", {"old": 1})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"results\.json: cannot write: No space left on device"):
        run.write_json("results.json", {"new": 2})
    assert json.loads((run.path / "results.json").read_text()) == {"old": 1}
    assert sorted(os.listdir(run)) == ["config.yaml", "results.json"]


def test_environment():
    found = environment()
    assert found["jax"] == jax.__version__
    assert found["python"] == platform.python_version()
    assert found["devices"] == len(found["device_list"]) == jax.device_count()
    assert set(found) >= {"jaxlib", "flax", "optax", "orbax", "spmd_distill", "platform", "device_kind"}
    json.dumps(found)


def test_environment_names_the_commit_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment()["git"] is None
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "run.yaml").write_text("steps: 1")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "one")):
        subprocess.run(["git", *words], check=True)
    found = environment()["git"]
    assert len(found["commit"]) == 40 and found["changed"] is False
    (tmp_path / "run.yaml").write_text("steps: 2")
    assert environment()["git"] == {**found, "changed": True}
    monkeypatch.setenv("PATH", "")
    assert environment()["git"] is None


def test_what_a_killed_write_left_goes_when_the_folder_is_held(tmp_path):
    run = RunFolder.create(tmp_path / "run", {})
    run.write_json("summary.json", {"steps": 1})
    (run.path / ".summary.json.4711.tmp").write_text('{"ste')
    with run.lock():
        assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "summary.json"]
    with run.lock(), pytest.raises(UserError, match=r"another process is training in it"), run.lock():
        pass


def test_of_two_that_begin_at_once_one_has_the_folder(tmp_path, monkeypatch):
    write, refused = RunFolder._replace, []

    def meanwhile(run, name, text):
        if not refused:
            with pytest.raises(UserError, match="another process is training in it") as error:
                RunFolder.create(run.path, {"mine": False})
            refused.append(error)
        write(run, name, text)

    monkeypatch.setattr(RunFolder, "_replace", meanwhile)
    run = RunFolder.create(tmp_path / "run", {"mine": True})
    assert refused and run.read_config() == {"mine": True}


def test_one_that_only_looks_does_not_keep_a_run_from_beginning(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path / "run", {})
    looking = os.open(run.path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))
    with run.lock():
        assert run.in_use()
    os.close(looking)


def test_who_is_refused_takes_nothing_away(tmp_path, monkeypatch):
    """Another process goes on with the new run before the one that made the folder has its lock."""
    begin = Session.begin
    with contextlib.ExitStack() as other:

        def begin_and_lose(*args):
            session = begin(*args)
            other.enter_context(session.folder.lock())
            return session

        monkeypatch.setattr(Session, "begin", begin_and_lose)
        with pytest.raises(UserError, match="another process is training in it"):
            distil(tiny_run(tmp_path), console=Console(quiet=True))
        assert RunFolder.open(tmp_path / "run").read_config()["steps"] == 6
