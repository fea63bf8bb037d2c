"""Checkpoints: what is restored is what was saved, whatever happened to the files or the run between."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_distill.checkpoint import Checkpoints, manifest
from spmd_distill.errors import UserError
from spmd_distill.types import TrainState

SHAPE, AXES = (2, 4), ("data", "model")
AUTO = (jax.sharding.AxisType.Auto,) * 2


def sharded(mesh_shape, *spec):
    return jax.NamedSharding(jax.make_mesh(mesh_shape, AXES, axis_types=AUTO), jax.P(*spec))


def state_at(step, place=None):
    """A train state whose every value depends on the step; matrices live on ``place``."""
    place = place or sharded(SHAPE, *AXES)
    w = jax.device_put(jnp.arange(64.0).reshape(8, 8) + step, place)
    params = {"layers": {"w": w}, "norm": jnp.full(8, step, jnp.bfloat16)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return TrainState(step=jnp.int32(step), params=params, opt_state=tx.init(params), seed=jnp.uint32(7))


def abstract(state, place=None):
    def leaf(x):
        spread = place if place is not None and x.ndim == 2 else sharded(SHAPE)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread)

    return jax.tree.map(leaf, state)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def write_steps(folder, *steps, keep=3):
    with Checkpoints(folder, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_at(step), {"tokens": step * 100})


def data_file(folder, step):
    """The largest file of a step's array data."""
    return max((p for p in (folder / str(step) / "state").rglob("*") if p.is_file()), key=os.path.getsize)


def flip(path, at=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 0x40
    path.write_bytes(content)


@pytest.mark.parametrize("async_", [True, False])
def test_round_trip(tmp_path, async_):
    checkpoints = Checkpoints(tmp_path / "new" / "folder", async_=async_)
    assert (checkpoints.latest(), checkpoints.steps()) == (None, [])
    state, meta = state_at(5), {"tokens": 500, "loader": {"epoch": 1, "position": [3, 4]}}
    checkpoints.save(5, state, meta)
    meta["loader"]["epoch"] = 99  # a caller may go on changing its own dict
    if not async_:
        assert checkpoints.latest() == 5
    checkpoints.wait()
    assert (checkpoints.latest(), checkpoints.steps()) == (5, [5])
    found, found_meta = checkpoints.restore(like=abstract(state))
    assert_same(found, state)
    assert found_meta == {"tokens": 500, "loader": {"epoch": 1, "position": [3, 4]}}
    assert (checkpoints.restored, checkpoints.bad) == (5, {})
    checkpoints.close()


@pytest.mark.parametrize("mesh, spec", [((4, 2), ("model", "data")), ((8, 1), (None, "data")), ((1, 8), ())])
def test_restores_to_another_mesh(tmp_path, mesh, spec):
    write_steps(tmp_path, 3)
    place = sharded(mesh, *spec)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        found, _ = checkpoints.restore(3, abstract(state_at(3), place))
    assert_same(found, state_at(3))
    assert found.params["layers"]["w"].sharding == place
    assert found.opt_state[1][0].mu["layers"]["w"].sharding == place


def test_donating_the_state_right_after_save_does_not_change_what_is_saved(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        state = state_at(1)
        checkpoints.save(1, state, {})
        jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state))
        assert_same(checkpoints.restore(like=abstract(state_at(1)))[0], state_at(1))


@pytest.mark.parametrize("keep, left", [(1, [5]), (2, [4, 5]), (None, [1, 2, 3, 4, 5])])
def test_keep(tmp_path, keep, left):
    write_steps(tmp_path, 1, 2, 3, 4, 5, keep=keep)
    assert sorted(os.listdir(tmp_path)) == [str(step) for step in left]


def test_keep_below_one_is_refused(tmp_path):
    with pytest.raises(UserError, match="found 0, expected 1"):
        Checkpoints(tmp_path, keep=0)


def test_saving_the_step_the_run_stands_at_changes_nothing(tmp_path):
    write_steps(tmp_path, 1)
    with Checkpoints(tmp_path) as checkpoints:
        state, _ = checkpoints.restore(like=abstract(state_at(1)))
        before = data_file(tmp_path, 1).stat()
        checkpoints.save(1, state, {})
        checkpoints.save(2, state_at(2), {})
        checkpoints.save(2, state_at(2), {"again": True})
        assert checkpoints.restore(2, abstract(state_at(2)))[1] == {}
    assert data_file(tmp_path, 1).stat() == before


DAMAGE = {
    "flipped byte": (lambda folder: flip(data_file(folder, 30)), "sha256 differs"),
    "flipped byte of meta": (lambda folder: flip(folder / "30/meta/metadata"), "sha256 differs"),
    "truncated": (lambda folder: os.truncate(data_file(folder, 30), 10), "has 10 bytes, expected"),
    "missing": (lambda folder: data_file(folder, 30).unlink(), "is missing"),
    "no manifest": (lambda folder: (folder / "30/manifest.json").unlink(), "never finished"),
    "manifest cut": (lambda folder: os.truncate(folder / "30/manifest.json", 40), "cannot be read"),
    "manifest of another shape": (
        lambda folder: (folder / "30/manifest.json").write_text("[]"),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_step_is_named_and_the_newest_good_one_used(tmp_path, caplog, damage):
    write_steps(tmp_path, 10, 20, 30)
    harm, reason = DAMAGE[damage]
    harm(tmp_path)
    with Checkpoints(tmp_path) as checkpoints:
        found, meta = checkpoints.restore(like=abstract(state_at(20)))
        assert_same(found, state_at(20))
        assert (meta, checkpoints.restored, list(checkpoints.bad)) == ({"tokens": 2000}, 20, [30])
        assert reason in checkpoints.bad[30]
        said = [r.getMessage() for r in caplog.records if r.name == "spmd_distill.checkpoint"]
        assert len(said) == 1 and f"{tmp_path}/30" in said[0] and reason in said[0]

        with pytest.raises(UserError, match=reason) as error:
            checkpoints.restore(30, abstract(state_at(30)))
        assert f"{tmp_path}/30" in str(error.value)
        assert checkpoints.restored == 20

        checkpoints.save(25, state_at(25), {})  # the run went on from 20: the bad step beyond it goes
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20, 25]
        assert_same(checkpoints.restore(like=abstract(state_at(25)))[0], state_at(25))


def test_no_good_step_at_all(tmp_path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match="holds no step"):
        checkpoints.restore(like=abstract(state_at(1)))
    write_steps(tmp_path, 1, 2)
    flip(data_file(tmp_path, 1))
    flip(data_file(tmp_path, 2))
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(UserError, match=r"none \(2: .*sha256.*; 1: .*sha256"):
            checkpoints.restore(like=abstract(state_at(1)))
        with pytest.raises(UserError, match=r"checkpoint 7: not in .*; it holds steps \[1, 2\]"):
            checkpoints.restore(7, abstract(state_at(1)))


def test_half_deleted_old_step_and_strangers_in_the_folder_do_no_harm(tmp_path):
    write_steps(tmp_path, 1, 2)
    for name in ("manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt"):
        (tmp_path / "1" / name).unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "README").write_text("mine")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps() == [2]
        checkpoints.restore(like=abstract(state_at(2)))
        checkpoints.save(3, state_at(3), {})
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "README", "notes"]


def test_going_back_to_an_earlier_step_gives_up_the_later_ones(tmp_path, caplog):
    write_steps(tmp_path, 10, 20, 30, keep=None)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.restore(10, abstract(state_at(10)))
        assert checkpoints.steps() == [10, 20, 30]  # reading takes nothing away
        checkpoints.save(20, state_at(21), {})
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20]
        assert_same(checkpoints.restore(like=abstract(state_at(20)))[0], state_at(21))
    assert "removing checkpoint 30" in caplog.text


CHANGED = {
    "dtype": (
        lambda p: {**p, "norm": p["norm"].astype(jnp.float32)},
        r"params\.norm: found bfloat16 \[8\], expected float32 \[8\]",
    ),
    "shape": (
        lambda p: {**p, "norm": p["norm"][:4]},
        r"params\.norm: found bfloat16 \[8\], expected bfloat16 \[4\]",
    ),
    "missing": (lambda p: {"layers": p["layers"]}, r"params\.norm: found bfloat16 \[8\], expected nothing"),
    "extra": (lambda p: {**p, "bias": p["norm"]}, r"params\.bias: found nothing, expected bfloat16 \[8\]"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_arrays_that_do_not_fit_are_named(tmp_path, change):
    write_steps(tmp_path, 1)
    alter, message = CHANGED[change]
    state = state_at(1)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match=message) as error:
        checkpoints.restore(1, abstract(state.replace(params=alter(state.params))))
    assert f"{tmp_path}/1" in str(error.value)


def test_many_differences_are_counted(tmp_path):
    write_steps(tmp_path, 1)
    wrong = jax.tree.map(lambda x: x.astype(jnp.float16), state_at(1))
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match="and 4 more"):
        checkpoints.restore(1, abstract(wrong))


def in_a_process(function, *args):
    """Run a function of this file in a process of its own, which may die or end in disorder."""
    here = Path(__file__)
    call = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem} as this; "
    call += f"this.{function.__name__}(*{[str(a) for a in args]!r})"
    return subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=600)


def save_and_die(folder, moment):
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state_at(1), {"tokens": 100})
    checkpoints.wait()
    if moment == "when all the data is written":
        manifest.write_manifest = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    else:
        manifest.write_manifest = lambda _: threading.Event().wait()  # else it may be committed before the kill comes
    checkpoints.save(2, state_at(2), {})
    if moment == "as soon as save returns":
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.wait()


@pytest.mark.parametrize("moment", ["as soon as save returns", "when all the data is written"])
def test_killed_while_saving(tmp_path, moment):
    done = in_a_process(save_and_die, tmp_path, moment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if moment == "when all the data is written":
        assert sorted(os.listdir(tmp_path)) == ["1", "2.orbax-checkpoint-tmp"]
    with Checkpoints(tmp_path, read_only=True) as reader:
        assert reader.steps() == [1]
    with Checkpoints(tmp_path) as checkpoints:
        assert os.listdir(tmp_path) == ["1"]
        found, meta = checkpoints.restore(like=abstract(state_at(1)))
        assert_same(found, state_at(1))
        assert (meta, checkpoints.bad) == ({"tokens": 100}, {})
        checkpoints.save(2, state_at(2), {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]


def save_until_full(folder):
    """No file may grow beyond some bytes: the nearest to a full disk that a test can make, root or not."""
    folder = Path(folder)
    big = state_at(2).replace(params={"w": jax.random.normal(jax.random.key(0), (512, 256))})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(1, state_at(1), {})
    for how in ("wait", "restore", "save", "close"):
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        checkpoints.save(2, big, {})
        with pytest.raises(UserError, match=r"cannot write: File too large \(.*steps \[1\] are intact") as error:
            {
                "wait": checkpoints.wait,
                "restore": lambda: checkpoints.restore(like=abstract(state_at(1))),
                "save": lambda: checkpoints.save(3, big, {}),
                "close": checkpoints.close,
            }[how]()
        assert f"checkpoint folder {folder}" in str(error.value)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert Checkpoints(folder, read_only=True).steps() == [1]
    with Checkpoints(folder, keep=1) as checkpoints:
        assert_same(checkpoints.restore(like=abstract(state_at(1)))[0], state_at(1))
        checkpoints.save(2, big, {})  # there is room again
        checkpoints.wait()
        assert checkpoints.verify(2) is None
    assert os.listdir(folder) == ["2"]


def test_full_disk(tmp_path):
    done = in_a_process(save_until_full, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_manifest_that_cannot_be_written_fails_the_save(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device", str(folder))

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_at(1), {})
    checkpoints.wait()
    monkeypatch.setattr("spmd_distill.checkpoint.manifest.write_manifest", full)
    checkpoints.save(2, state_at(2), {})
    with pytest.raises(UserError, match=r"No space left on device \(finished steps \[1\] are intact\)"):
        checkpoints.wait()
    assert os.listdir(tmp_path) == ["1"]
    checkpoints.close()


@pytest.mark.parametrize("error", [ValueError("No ArrayMetadata found"), OSError(28, "No space left on device")])
def test_a_folder_that_a_save_made_anew_is_gone_all_the_same(tmp_path, monkeypatch, error):
    folder = tmp_path / "checkpoints"

    def taken_away(_):
        folder.rename(tmp_path / "away")
        (folder / "2.orbax-checkpoint-tmp").mkdir(parents=True)  # as tensorstore does, which writes into it
        raise error

    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state_at(1), {})
    checkpoints.wait()
    monkeypatch.setattr(manifest, "write_manifest", taken_away)
    checkpoints.save(2, state_at(2), {})
    with pytest.raises(UserError, match="checkpoints: is gone, so nothing can be saved"):
        checkpoints.wait()
    checkpoints.close()
    assert Checkpoints(tmp_path / "away", read_only=True).steps() == [1]


@pytest.mark.parametrize("when", ["before the save", "while it is made", "after it"])
def test_a_save_into_a_folder_that_was_made_anew_is_none(tmp_path, monkeypatch, when):
    folder, write, finalise = tmp_path / "checkpoints", manifest.write_manifest, Checkpoints._finalise

    def take_away():
        folder.rename(tmp_path / "away")
        shutil.copytree(tmp_path / "away", folder)

    def take_away_first(self):
        if self._saving.step == 2:
            take_away()
        finalise(self)

    if when == "while it is made":
        monkeypatch.setattr(Checkpoints, "_finalise", take_away_first)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state_at(1), {})
    checkpoints.wait()
    if when == "before the save":
        take_away()
    if when == "after it":
        monkeypatch.setattr(manifest, "write_manifest", lambda step: [write(step), take_away()])
    with pytest.raises(UserError, match="checkpoints: is gone, so nothing can be saved"):
        checkpoints.save(2, state_at(2), {})
        checkpoints.wait()
    checkpoints.close()
    if when != "after it":
        assert Checkpoints(folder, read_only=True).steps() == [1]  # none without all of its files gets a manifest


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("here")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"{folder}: cannot write"):
            Checkpoints(folder)
    with pytest.raises(UserError, match="no such folder"):
        Checkpoints(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="found a URL"):
        Checkpoints("gs://bucket/run")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /sys, which nobody may write")
@pytest.mark.parametrize("folder", ["/sys/kernel", "/sys/kernel/new"])
def test_read_only_folder(folder):
    with pytest.raises(UserError, match=f"{folder}: cannot write: "):
        Checkpoints(folder)


def test_mistakes_of_our_own_stay_what_they_are(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TypeError, match="JSON serializable"):
        checkpoints.save(1, state_at(1), {"bad": object()})
    checkpoints.save(1, state_at(1), {})
    checkpoints.close()
    with pytest.raises(AssertionError), Checkpoints(tmp_path, read_only=True) as reader:
        reader.save(2, state_at(2), {})


def test_manifest_lists_every_file_that_holds_state(tmp_path):
    write_steps(tmp_path, 1)
    listed = set(json.loads((tmp_path / "1/manifest.json").read_text())["files"])
    there = {p.relative_to(tmp_path / "1").as_posix() for p in (tmp_path / "1").rglob("*") if p.is_file()}
    assert there - listed == {"manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt"}
