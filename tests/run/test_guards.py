"""Guards in whole runs: what is skipped, named, counted, written down, and the same after a resume."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tiny import tiny_run, train_until_first_checkpoint

from spmd_distill import build
from spmd_distill.config import GuardsConfig
from spmd_distill.errors import UserError
from spmd_distill.guards import Events, find_rows, name_rows, read_events
from spmd_distill.guards.clip import ClipGuard
from spmd_distill.guards.memory import check_memory, smaller
from spmd_distill.guards.spike import SpikeGuard
from spmd_distill.metrics import CLOCKED, read_metrics
from spmd_distill.objective import Objective
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.train import distil

QUIET = Console(quiet=True)


@dataclass(frozen=True)
class PoisonedAt(Objective):
    """A loss that is NaN in one optimizer step."""

    at: int = 2

    def __call__(self, head, student, teacher, batch, step, count, **rest):
        loss, sums = super().__call__(head, student, teacher, batch, step, count, **rest)
        spoiled = jnp.where(step == self.at, jnp.nan, 1.0).astype(loss.dtype)
        return loss * spoiled, sums | {"loss": sums["loss"] * spoiled}


@dataclass(frozen=True)
class BadOn(OnlineTeacher):
    """A teacher that is NaN on every row that begins with these tokens."""

    tokens: tuple[int, ...] = ()

    def targets(self, params, batch, shard, taps):
        out, seen = super().targets(params, batch, shard, taps)
        row = (batch.tokens[..., : len(self.tokens)] == jnp.asarray(self.tokens)).all(-1)
        hidden = out.hidden.reshape(*batch.tokens.shape, -1)
        return out.replace(hidden=jnp.where(row[..., None, None], jnp.nan, hidden).reshape(out.hidden.shape)), seen


def trace(run: Path) -> list[str]:
    """What was trained and evaluated, without what a clock says; as text, where NaN is NaN."""
    clocks = ("seconds", *CLOCKED)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [json.dumps({k: v for k, v in line.items() if k not in clocks}) for line in lines]


def poisoned(monkeypatch, at: int) -> None:
    real = build.build_objective
    monkeypatch.setattr(build, "build_objective", lambda *args: PoisonedAt(**vars(real(*args)), at=at))


def test_a_skipped_step_is_counted_and_a_resumed_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    poisoned(monkeypatch, at=1)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    summary = distil(tiny_run(whole, "--steps", "4"), console=QUIET)
    assert summary["guards"]["skipped"] == 1
    lines = [m for m in read_metrics(whole / "run") if m.split == "train"]
    assert [m.values["skipped"] for m in lines] == [0, 1, 0, 0]
    assert [m.values["skipped_total"] for m in lines] == [0, 1, 1, 1]
    assert lines[2].values["learning_rate"] == lines[1].values["learning_rate"], "the optimizer has not seen step 2"
    assert math.isnan(lines[1].values["loss"]) and math.isfinite(lines[2].values["loss"])
    (event,) = [e for e in read_events(whole / "run") if e.guard == "skipped"]
    assert event.step == 2 and event.values["in_row"] == 1 and event.values["loss"] is None
    assert "rows " in event.message and "(samples 8 to 15 of the run)" in event.message

    train_until_first_checkpoint(tiny_run(cut, "--steps", "4"))
    distil(tiny_run(cut, "--steps", "4"), resume=True, console=QUIET)
    assert trace(cut / "run") == trace(whole / "run")
    assert json.loads((cut / "run" / "summary.json").read_text())["guards"] == summary["guards"]
    assert [e.step for e in read_events(cut / "run") if e.guard == "resumed"] == [2]


def test_so_many_skips_in_a_row_end_the_run_and_change_nothing(tmp_path):
    config = tiny_run(tmp_path, "--optimizer.learning_rate", "1e30", "--optimizer.clip_norm", "null",
                      "--guards.nonfinite_in_row", "2")  # fmt: skip
    with pytest.raises(UserError) as stop:
        distil(config, console=QUIET)
    assert "Step 3: " in str(stop.value) and "for the 2nd step in a row" in str(stop.value)
    assert "grad_norm is nan" in str(stop.value) and "The last batch was rows " in str(stop.value)
    assert "(samples 16 to 23 of the run)" in str(stop.value)
    assert "optimizer.learning_rate" in str(stop.value)
    assert [e.step for e in read_events(tmp_path / "run") if e.guard == "skipped"] == [2, 3]


def test_a_bad_teacher_ends_the_run_and_its_rows_are_named(tmp_path, monkeypatch):
    config = tiny_run(tmp_path)
    train = build.load_text(build.set_up(config)).train
    row = 5
    tokens = tuple(int(t) for t in train.take([row]).tokens[0, :12])
    same = [i for i in range(len(train)) if tuple(train.take([i]).tokens[0, :12]) == tokens]
    monkeypatch.setattr(build, "OnlineTeacher", lambda model: BadOn(model, tokens))
    with pytest.raises(UserError) as stop:
        distil(config, console=QUIET)
    assert "the teacher's log-probabilities are not finite (ce_teacher is nan" in str(stop.value)
    named = str(stop.value).split(" on rows ")[1].split(" of the training data")[0]
    assert set(map(int, named.split(", "))) <= set(same)
    lines = [m for m in read_metrics(tmp_path / "run") if m.split == "train"]
    assert lines[-1].values["skipped"] == 1 and math.isfinite(lines[-1].values["ce_student"])
    assert read_events(tmp_path / "run")[-1].guard == "teacher"


# The parts


def test_rows_are_found_by_halving():
    for bad in ([], [0], [7], [2, 3], [0, 5, 6], list(range(8))):
        asked = []

        def is_bad(rows, bad=bad, asked=asked):
            asked.append(rows)
            return bool(set(rows) & set(bad))

        assert find_rows(is_bad, 8) == bad
        assert len(asked) <= 1 + 6 * max(len(bad), 0)


def test_rows_in_words():
    assert name_rows([(8, 3), (9, 1)]) == "rows 3, 1 of the training data (samples 8 to 9 of the run)"
    assert name_rows([(8, 3), (12, 1)]) == "rows 3, 1 of the training data (samples 8, 12 of the run)"
    assert name_rows([(i, 0) for i in range(20)], most=2).startswith("rows 0, 0 and 18 more of")


def test_clipped_steps_are_counted_as_the_optimizer_sees_them(tmp_path):
    events = Events(tmp_path)
    guard = ClipGuard(0.1, events)
    seen = [(0.09, 0, 0), (float(np.float32(0.1)), 0, 1), (3.0, 0, 1), (math.nan, 1, 0), (3.0, 0, 1), (1.0, 0, 1)]
    for step, (norm, skipped, clipped) in enumerate(seen, 1):
        assert guard.measure(step, {"grad_norm": norm, "skipped": skipped})["clipped"] == clipped
    assert events.totals == {"clipped": 4}
    assert [e.step for e in read_events(tmp_path)] == [2, 3, 6], "the 1st, 2nd and 4th"
    assert ClipGuard(None, events).measure(1, {"grad_norm": 9.0, "skipped": 0}) == {}


@pytest.mark.parametrize("action", ["off", "warn", "skip", "stop"])
def test_a_spike_against_the_median(tmp_path, action):
    said = []
    guard = SpikeGuard(GuardsConfig(spike=action, spike_window=3), Events(tmp_path, said.append))
    for step, loss in enumerate([1.0, 50.0, 2.0], 1):
        assert guard.limit == math.inf
        guard.check(step, {"loss": loss}, lambda _: "rows")
    assert guard.limit == (math.inf if action == "off" else 6.0)
    guard.check(4, {"loss": math.nan}, lambda _: "rows")
    guard.check(5, {"loss": 6.0}, lambda _: "rows")  # the median of 50, 2 and 6 is 6
    assert not said
    if action == "stop":
        with pytest.raises(UserError, match=r"Step 6: the loss 19 is above 3 times the running median 6.*was rows"):
            guard.check(6, {"loss": 19.0}, lambda _: "rows")
    else:
        guard.check(6, {"loss": 19.0}, lambda _: "rows")
    assert len(said) == len(read_events(tmp_path)) == (action != "off")
    again = SpikeGuard(GuardsConfig(spike=action, spike_window=3), Events(tmp_path))
    again.restore(json.loads(json.dumps(guard.state())))
    assert again.limit == guard.limit


def test_events_survive_a_kill_in_the_middle_of_a_line(tmp_path):
    Events(tmp_path).add(1, "spike", "first", {"loss": np.float32(2.0), "bad": math.inf, "rows": [1, 2]})
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"step": 2, "sec')
    Events(tmp_path, writes=False).add(3, "spike", "of another process")
    later = Events(tmp_path)
    later.goes_on(1, 100.0, {"spike": 1})
    later.add(2, "spike", "second")
    found = read_events(tmp_path)
    assert [(e.step, e.guard) for e in found] == [(1, "spike"), (1, "resumed"), (2, "spike")]
    assert found[0].values == {"loss": 2.0, "bad": None, "rows": [1, 2]} and found[2].seconds >= 100
    assert later.totals == {"spike": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [("nonfinite_in_row", 0), ("spike_window", 0), ("spike_factor", 1.0), ("memory", 1.5),
     ("device_memory_gib", 0.0)],
)  # fmt: skip
def test_settings_that_no_guard_can_use_are_named(name, value):
    with pytest.raises(UserError, match=rf"guards\.{name} is {value}"):
        GuardsConfig(**{name: value}).check()


def test_a_step_that_does_not_fit_is_refused_with_its_numbers_before_anything_is_placed(tmp_path):
    config = tiny_run(tmp_path, "--guards.device_memory_gib", "0.0001")
    with pytest.raises(UserError, match=r"needs .* GiB of a device that has 0.0001 GiB: \d+ %, over the 80 %") as stop:
        distil(config, console=QUIET)
    assert "--data.rows 2 --data.micro_batches 4" in str(stop.value)  # 4 rows over 2 batch shards
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("needed", "flags", "refused"),
    [
        (79, (), False),
        (81, (), True),
        (81, ("--guards.memory", "null"), False),
        (81, ("--guards.memory", "0.9"), False),
        (None, (), False),
    ],
)
def test_the_bound_is_a_share_of_what_the_device_has(tmp_path, needed, flags, refused):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 100}

    config = tiny_run(tmp_path, *flags)
    if refused:
        with pytest.raises(UserError, match=r"over the 80 % of guards\.memory"):
            check_memory(config, needed, [Device()], 2)
    else:
        check_memory(config, needed, [Device()], 2)


def test_the_change_that_is_proposed_can_be_made(tmp_path):
    config = tiny_run(tmp_path)
    assert "--data.rows 2 --data.micro_batches 4" in smaller(config, 2)
    assert "--student.remat full" in smaller(config, 4)
    assert "--mesh fsdp" in smaller(replace(config, student=replace(config.student, remat="full")), 4)


def test_a_run_folder_that_is_gone_needs_no_space(tmp_path):
    events = Events(tmp_path / "run", writes=False)
    events._writes = True
    with pytest.raises(UserError, match=r"events\.jsonl: cannot write: .*; its folder is gone"):
        events.add(1, "spike", "message")
