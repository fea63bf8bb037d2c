"""A device that runs out of memory: the micro-batches are halved, and the run is what it would have been."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tiny import tiny_run

from spmd_distill import fitting
from spmd_distill.checkpoint import Checkpoints
from spmd_distill.config import RunConfig, to_dict
from spmd_distill.errors import UserError
from spmd_distill.guards import halved, is_out_of_memory, read_events
from spmd_distill.metrics import read_metrics
from spmd_distill.metrics.throughput import CLOCKED
from spmd_distill.resuming import changes
from spmd_distill.resuming.halved import recall
from spmd_distill.runfolder import RunFolder
from spmd_distill.train import distil

QUIET = Console(quiet=True)
EXACT = [x for name in ("compute", "teacher", "student") for x in (f"--precision.{name}", "float64")]


def run_of(folder: Path, *flags: str) -> RunConfig:
    cut = ("--data.rows", "16", "--data.micro_batches", "1")
    return tiny_run(folder, "--mesh", "dp", *cut, *EXACT, *flags)


def no_memory() -> jax.errors.JaxRuntimeError:
    """The real one, of 16 TiB that nobody has."""
    with pytest.raises(jax.errors.JaxRuntimeError) as found:
        jax.block_until_ready(jnp.zeros((1 << 20, 1 << 22), jnp.float32))
    return found.value


class Exhausted:
    """Devices without room: for compiling so many times, then at some calls of the step, counted over the run."""

    def __init__(self, patch: pytest.MonkeyPatch, compiling: int = 0, calls: tuple[int, ...] = (), loses: bool = False):
        self.compiling, self.calls, self.loses, self.called = compiling, calls, loses, 0
        self.shapes: list[tuple[int, ...]] = []
        self.real = fitting.compile_train_step
        patch.setattr(fitting, "compile_train_step", self.compile)

    def compile(self, run, tx, batch, skip):
        self.shapes.append(batch.tokens.shape[:2])
        if len(self.shapes) <= self.compiling:
            raise no_memory()
        made = self.real(run, tx, batch, skip)

        def call(*args):
            self.called += 1
            if self.called in self.calls:
                if self.loses:
                    made(*args)  # what it returns is lost, and so is the state that it was given
                raise no_memory()
            return made(*args)

        return replace(made, call=call)


def trace(run: Path) -> list[dict]:
    """What was trained and evaluated, without what a clock says and without the cut."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in (*CLOCKED, "seconds")} for line in lines]


def assert_same_but_for_the_cut(run: Path, other: Path) -> None:
    found, wanted = trace(run), trace(other)
    assert [line.keys() for line in found] == [line.keys() for line in wanted]
    for one, two in zip(found, wanted, strict=True):
        for name in one.keys() - {"micro_batches", "split"}:
            np.testing.assert_allclose(one[name], two[name], rtol=1e-9, atol=1e-12, err_msg=f"{name} in {one}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder, before = tmp_path_factory.mktemp("undisturbed"), jax.config.read("jax_enable_x64")
    distil(run_of(folder), console=QUIET)
    jax.config.update("jax_enable_x64", before)
    return folder / "run"


def test_at_compile_time(tmp_path, undisturbed, monkeypatch):
    devices = Exhausted(monkeypatch, compiling=1)
    summary = distil(run_of(tmp_path), console=QUIET)
    assert devices.shapes == [(1, 16), (2, 8)]
    assert_same_but_for_the_cut(tmp_path / "run", undisturbed)
    assert summary["guards"]["out_of_memory"] == 1
    (event,) = [e for e in read_events(tmp_path / "run") if e.guard != "clipped"]
    assert (event.step, event.guard, event.values) == (0, "out_of_memory", {"rows": 8, "micro_batches": 2})
    assert "data.rows 16 -> 8, data.micro_batches 1 -> 2" in event.message and "allocating" in event.message


def test_at_run_time_with_the_state_lost_it_goes_on_from_the_checkpoint(tmp_path, undisturbed, monkeypatch):
    devices = Exhausted(monkeypatch, calls=(4,), loses=True)
    distil(run_of(tmp_path), console=QUIET)
    assert devices.shapes == [(1, 16), (2, 8)]
    assert devices.called == 3 + 1 + 4, "steps 1 to 3, the one that failed, and 3 to 6 from checkpoint 2 on"
    assert_same_but_for_the_cut(tmp_path / "run", undisturbed)
    lines = [m for m in read_metrics(tmp_path / "run") if m.split == "train"]
    assert [m.values["micro_batches"] for m in lines] == [1, 1, 2, 2, 2, 2]
    events = [(e.step, e.guard) for e in read_events(tmp_path / "run") if e.guard != "clipped"]
    assert events == [(2, "resumed"), (2, "out_of_memory")]


def test_at_step_3_and_killed_and_resumed_bit_for_bit(tmp_path, undisturbed, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with monkeypatch.context() as patch:
        devices = Exhausted(patch, calls=(3,))
        distil(run_of(whole), console=QUIET)
        assert devices.called == 7, "the step is taken again at once"
    assert_same_but_for_the_cut(whole / "run", undisturbed)
    assert [e.step for e in read_events(whole / "run") if e.guard == "out_of_memory"] == [3]

    class Killed(Exception):
        pass

    def save_4(self, step, *args, saves=Checkpoints.save):
        saves(self, step, *args)
        if step == 4:
            self.wait()
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        Exhausted(patch, calls=(3,))
        patch.setattr(Checkpoints, "save", save_4)
        distil(run_of(cut), console=QUIET)
    devices = Exhausted(monkeypatch)
    distil(run_of(cut), resume="auto", console=QUIET)
    assert devices.shapes == [(2, 8)], "the run file still asks for 16 rows"
    assert trace(cut / "run") == trace(whole / "run")


def test_the_end_is_a_sentence(tmp_path, monkeypatch):
    devices = Exhausted(monkeypatch, compiling=9)
    with pytest.raises(UserError, match=r"ran out of memory \(.*\), and data.rows is 8 over 8 batch shard") as stop:
        distil(run_of(tmp_path), console=QUIET)
    assert devices.shapes == [(1, 16), (2, 8)] and "Try --student.remat full" in str(stop.value)
    assert not (tmp_path / "run").exists()


def test_stop_stops(tmp_path):
    config = run_of(tmp_path, "--guards.out_of_memory", "stop")
    with pytest.raises(UserError, match=r"ran out of memory.*Try --data.rows 8 --data.micro_batches 2"):
        halved(config, no_memory(), 8)


def test_other_errors_are_none_of_it():
    assert is_out_of_memory(no_memory())
    assert not is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: something else"))
    assert not is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))


def test_only_the_product_of_rows_and_micro_batches_makes_it_another_training(tmp_path):
    saved = to_dict(run_of(tmp_path))
    same = changes(saved, run_of(tmp_path, "--data.rows", "8", "--data.micro_batches", "2"))
    assert [(c.name, c.effect) for c in same] == [("data.rows", "rounding"), ("data.micro_batches", "rounding")]
    (other,) = changes(saved, run_of(tmp_path, "--data.rows", "8"))
    assert other.effect == "another"


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('{"fits": [4, 4], "asked": [[16, 1], [8, 2]]}', 4),
        ('{"fits": [8, 2], "asked": [[32, 1]]}', 16),  # of another batch
        ('{"fits": [8, 1], "asked": [[16, 1]]}', 16),  # not the same batch: made by nobody here
        ("{", 16),
    ],
)
def test_what_fits_is_recalled_for_what_was_asked(tmp_path, text, rows):
    config = run_of(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "micro_batches.json").write_text(text)
    found = recall(RunFolder(tmp_path / "run"), config)
    assert (found.data.rows, found.data.micro_batches) == (rows, 16 // rows)
    stop = replace(config, guards=replace(config.guards, out_of_memory="stop"))
    assert recall(RunFolder(tmp_path / "run"), stop) == stop
