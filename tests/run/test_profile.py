"""What a profile says of devices, the bytes that layouts move, and the warnings that come of both."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from tiny import tiny_run

from spmd_distill import guards
from spmd_distill.config import RunConfig
from spmd_distill.guards import Events, Profile, read_events
from spmd_distill.guards.profile import WARM, profiled_steps
from spmd_distill.loop import Loop
from spmd_distill.mappers import make_mapper
from spmd_distill.program import DeviceTime, device_time, quieter_layout, read_trace, wire_bytes
from spmd_distill.proof import _Case
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.train import distil

BUSY = DeviceTime(seconds=1.0, busy=0.95, communication=0.1, kinds={"all-reduce": 0.1})


def plane(name, **lines):
    """A device's plane; a line is a list of (operation, start, end)."""
    events = {
        line.replace("_", " "): [
            SimpleNamespace(name=n, start_ns=float(a), duration_ns=float(b - a)) for n, a, b in found
        ]
        for line, found in lines.items()
    }
    return SimpleNamespace(name=name, lines=[SimpleNamespace(name=n, events=e) for n, e in events.items()])


def test_what_hides_behind_a_matmul_costs_nothing():
    gpu = plane(
        "/device:GPU:0",
        Stream_7=[("gemm_fusion", 0, 40), ("loop_fusion", 40, 50), ("gemm_fusion", 70, 90)],
        Stream_9=[("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 30, 60), ("ncclDevKernel_SendRecv", 85, 100)],
        XLA_Modules=[("jit_step", 0, 1000)],
    )
    found = device_time([gpu])
    assert found == DeviceTime(1e-7, 0.9, 0.2, {"all-reduce": 0.1, "collective-permute": 0.1})
    tpu = plane(
        "/device:TPU:0",
        XLA_Ops=[("%fusion.3", 0, 50), ("%all-gather-done.1", 50, 100)],
        Async_XLA_Ops=[("%all-gather-start.1", 20, 60), ("%reduce-scatter.4", 100, 200)],
        Steps=[("1", 0, 900)],
    )
    both = device_time([gpu, tpu, plane("/host:CPU", Stream_1=[("x", 0, 10**6)])])
    assert both.busy == pytest.approx((0.9 + 1.0) / 2) and both.communication == pytest.approx((0.2 + 0.75) / 2)
    assert both.kinds == {
        "reduce-scatter": pytest.approx(0.25), "all-gather": pytest.approx(0.125), "all-reduce": pytest.approx(0.05),
        "collective-permute": pytest.approx(0.05),
    }  # fmt: skip
    assert device_time([]) is None and device_time([plane("/device:GPU:0", Stream_1=[])]) is None


def test_a_real_trace_of_a_cpu_has_no_device(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        jnp.ones(3).sum().block_until_ready()
    assert list(tmp_path.rglob("*.xplane.pb")) and read_trace(tmp_path) is None


@pytest.fixture(scope="module")
def moved():
    """Bytes on the wire of the proof's step, by layout."""
    case, found = _Case("float32", None, 8), {}
    for name in ("single", "dp8", "tp8", "dp2_tp4", "fsdp8", "sp2_tp4"):
        mapper, teacher = make_mapper("shard_map", name), OnlineTeacher(case.teacher)
        run = Distillation(case.student, teacher, case.objective, mapper, case.head, jnp.dtype("float32"))
        found[name] = run, case.batches[0], wire_bytes(run, case.batches[0])
    return found


def test_bytes_of_data_parallelism_are_those_of_the_gradient(moved):
    run, _, found = moved["dp8"]
    gradient = sum(x.size * 4 for x in jax.tree.leaves(run.student.abstract))
    assert moved["single"][2] == 0
    assert 2 * 7 / 8 * gradient <= found < 2 * 7 / 8 * gradient + 10_000  # and a few sums of metrics


def test_bytes_of_layouts_stand_in_the_order_of_what_they_do(moved):
    """Fully sharded parameters are gathered for both models as well; sequence sharding moves what it replaces."""
    found = {name: size for name, (_, _, size) in moved.items()}
    assert found["fsdp8"] > found["dp8"]
    assert found["dp2_tp4"] > 0 and found["tp8"] > 0
    assert found["sp2_tp4"] == pytest.approx(found["dp2_tp4"], rel=0.25)


def test_the_layout_that_moves_least_is_found(moved):
    run, batch, own = moved["fsdp8"]
    name, theirs, ours = quieter_layout(run, batch)
    assert ours == own and theirs <= min(size for layout, (_, _, size) in moved.items() if layout != "single") < own
    best = replace(run, mapper=make_mapper("shard_map", name))
    assert wire_bytes(best, batch) == theirs and quieter_layout(best, batch) is None
    assert quieter_layout(replace(run, mapper=make_mapper("pmap", "fsdp8")), batch) == (name, theirs, ours)


def profile(tmp_path, found, **settings):
    said = []
    config = replace(RunConfig(), guards=replace(RunConfig().guards, **settings))
    Profile(config, Events(tmp_path, said.append), 0, lambda: ("dp4_tp2", 2**20, 3 * 2**20)).judge(10, found)
    return said, [event.guard for event in read_events(tmp_path)]


def test_one_warning_each_with_what_was_measured_and_a_better_layout(tmp_path):
    assert profile(tmp_path, BUSY) == ([], [])
    talking = replace(BUSY, communication=0.31, kinds={"all-reduce": 0.25, "all-gather": 0.06})
    (message,), kinds = profile(tmp_path, talking)
    assert kinds == ["communication"]
    assert "31 % of their time (all-reduce 25 %, all-gather 6 %), more than the 20 %" in message
    assert "--mesh dp4_tp2 would move 1 MiB a device and step instead of 3 MiB" in message
    assert profile(tmp_path / "..", talking, communication=None)[0] == []
    (message,), _ = profile(tmp_path, replace(BUSY, busy=0.6))
    assert "at work in 60 % of the time, less than the 85 %" in message
    assert profile(tmp_path, replace(BUSY, busy=0.6), utilisation=0.5)[0] == []


@pytest.mark.parametrize(
    ("settings", "first", "expected"),
    [
        ({}, 0, range(WARM + 1, WARM + 6)),
        ({"steps": WARM + 5}, 0, range(WARM + 1, WARM + 6)),
        ({"steps": WARM + 4}, 0, range(0)),
        ({"eval.every": 8}, 0, range(10, 15)),  # 9 to 14 have no evaluation but the one after 8
        ({"checkpoint.every": 3}, 0, range(0)),
        ({}, 30, range(36, 41)),
        ({"guards.profile_steps": None}, 0, range(0)),
        ({"guards.communication": None}, 0, range(WARM + 1, WARM + 6)),
        ({"guards.communication": None, "guards.utilisation": None}, 0, range(0)),
    ],
)
def test_steps_that_are_profiled_stand_away_from_evaluations_and_checkpoints(settings, first, expected):
    config = replace(RunConfig(), steps=1000)
    for name, value in settings.items():
        section, _, field = name.rpartition(".")
        inner = {field: value} if not section else {section: replace(getattr(config, section), **{field: value})}
        config = replace(config, **inner)
    assert profiled_steps(config, first) == expected


def test_a_run_takes_its_profile_once_and_survives_a_profiler_that_fails(tmp_path, monkeypatch):
    train, traces = Loop._train, []

    def as_on_an_accelerator(loop, *args):
        loop.on_cpu = False  # safe on one device, whose programs run one after another
        return train(loop, *args)

    def read(folder):
        traces.append(read_trace(folder))
        if len(traces) == 2:
            raise RuntimeError("no trace")
        return replace(BUSY, busy=0.5)

    monkeypatch.setattr(Loop, "_train", as_on_an_accelerator)
    monkeypatch.setattr(guards.profile, "read_trace", read)
    flags = ("--mesh", "single", "--steps", "14", "--eval.every", "20", "--checkpoint.every", "20")
    for name, guard, said in (("a", "utilisation", "50 % of the time"), ("b", "profile", "RuntimeError: no trace")):
        config = tiny_run(tmp_path, *flags, "--run", str(tmp_path / name))
        distil(config, console=Console(quiet=True))
        (event,) = [event for event in read_events(tmp_path / name) if event.guard not in ("clipped", "resumed")]
        assert event.guard == guard and said in event.message and event.step == WARM + 5
    assert traces == [None, None]
