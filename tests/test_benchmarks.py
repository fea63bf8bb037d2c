"""What the benchmarks stand on: the counter of HLO texts, rows and their bars, workers, environments of peers."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(Path(__file__).parent / "run")]

import _peers  # noqa: E402
import loop as of_loop  # noqa: E402
from _hlo import Traffic, memory, read  # noqa: E402
from _report import Row, report  # noqa: E402
from _worker import Worker, WorkerFailed  # noqa: E402
from _workload import Workload  # noqa: E402
from tiny import tiny_run  # noqa: E402


def module(*lines: str, more: str = "", header: str = "HloModule jit_f, num_partitions=8") -> str:
    """An HLO text whose entry computation holds ``lines``; ``more`` are further computations."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"{header}\n\n{more}\nENTRY %main (p: f32[64]) -> f32[64] {{\n  %p = f32[64]{{0}} parameter(0)\n{body}\n}}\n"


ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


@pytest.mark.parametrize(
    ("line", "kind", "result", "wire"),
    [
        (
            "%x = f32[64]{0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add",
            "all-reduce",
            256,
            256,
        ),
        ("%x = f32[64]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add", "all-reduce", 256, 384),
        ("%x = f32[64]{0} all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add", "all-reduce", 256, 256),
        ("%x = f32[64]{0} all-reduce(%p), replica_groups={}, to_apply=%add", "all-reduce", 256, 448),
        ("%x = f32[64]{0} all-reduce(%p), to_apply=%add", "all-reduce", 256, 448),
        (
            "%x = bf16[4,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), dimensions={0}, "
            "replica_groups=mesh['data'=2,'model'=4] {'model'}",
            "all-gather",
            1024,
            768,
        ),
        (
            "%x = f32[64]{0} all-gather(%p), replica_groups=mesh['data'=2,'model'=4], device_ids=([4,2]T(1,0)) "
            "{'data','model'}",
            "all-gather",
            256,
            224,
        ),
        ("%x = f32[64]{0} all-gather(%p), replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", "all-gather", 256, 128),
        ("%x = f32[8]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}", "reduce-scatter", 32, 224),
        (
            "%x = (f32[32]{0}, /*index=1*/f32[32]{0}) all-to-all(%p, %p), replica_groups={{0,1},{2,3}}",
            "all-to-all",
            256,
            128,
        ),
        ("%x = f32[64]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}", "collective-permute", 256, 256),
    ],
)
def test_bytes_of_each_kind_of_collective_and_spelling_of_its_groups(line, kind, result, wire):
    assert read(module(line, more=ADD)).by_kind == {kind: Traffic(1, result, wire)}


@pytest.mark.parametrize(
    ("start", "kind", "result"),
    [
        ("(f32[16]{0}, f32[64]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}", "all-gather", 256),
        (
            "((f32[16]{0}, f32[8]{0}), (f32[64]{0}, f32[32]{0})) all-gather-start(%p), replica_groups=[2,4]<=[8]",
            "all-gather",
            384,
        ),
        ("f32[64]{0} all-reduce-start(%p), replica_groups=[2,4]<=[8], to_apply=%add", "all-reduce", 256),
        ("((f32[64]{0}), f32[16]{0}, s32[]{:S(2)}) reduce-scatter-start(%p), to_apply=%add", "reduce-scatter", 64),
        ("(f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%p)", "collective-permute", 256),
    ],
)
def test_an_asynchronous_pair_counts_once(start, kind, result):
    found = read(module(f"%x = {start}", f"%y = f32[64]{{0}} {kind}-done(%x)", more=ADD)).by_kind
    assert {name: (t.count, t.result_bytes) for name, t in found.items()} == {kind: (1, result)}


def test_a_wrapped_asynchronous_collective_counts_once():
    wrapped = """%wrapped (q: f32[64]) -> f32[8] {
  %q = f32[64]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}
"""
    text = module(
        "%s = ((f32[64]{0}), f32[8]{0}, s32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[64]{0}), f32[8]{0}, s32[]) async-update(%s), calls=%wrapped",
        "ROOT %d = f32[8]{0} async-done(%u), calls=%wrapped",
        more=ADD + wrapped,
    )
    assert read(text).total == Traffic(1, 32, 224)


def loop(condition: str, config: str = "") -> str:
    """A module whose loop gathers 256 bytes an iteration, between two devices."""
    more = f"""%body (t: (s32[], f32[64], s32[])) -> (s32[], f32[64], s32[]) {{
  %t = (s32[], f32[64]{{0}}, s32[]) parameter(0)
  %v = f32[64]{{0}} get-tuple-element(%t), index=1
  %g = f32[64]{{0}} all-gather(%v), channel_id=1, replica_groups=[4,2]<=[8], dimensions={{0}}
  %w = f32[4,8]{{1,0}} reshape(%v)
  %m = f32[4,4]{{1,0}} dot(%w, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  ROOT %out = (s32[], f32[64]{{0}}, s32[]) tuple(%t, %g, %t)
}}

{condition}
"""
    return module(
        f"%loop = (s32[], f32[64]{{0}}, s32[]) while(%p), condition=%condition, body=%body{config}",
        "ROOT %r = f32[64]{0} get-tuple-element(%loop), index=1",
        more=more,
    )


def condition(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in ("%c = (s32[], f32[64], s32[]) parameter(0)", *lines))
    return f"%condition (c: (s32[], f32[64], s32[])) -> pred[] {{\n{body}\n}}"


INDEX, BOUND = "%i = s32[] get-tuple-element(%c), index=0", "%n = s32[] get-tuple-element(%c), index=2"
FIVE, OTHER = "%five = s32[] constant(5)", "%other = s32[] constant(77)"
DATA_DEPENDENT = "ROOT %l = pred[] compare(%i, %n), direction=LT"
KNOWN = condition(INDEX, BOUND, DATA_DEPENDENT), ', backend_config={"known_trip_count":{"n":"7"}}'
FUSED = """%compared (x: s32[], y: s32[]) -> pred[] {
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %less = pred[] compare(%x, %y), direction=LT
}

"""


@pytest.mark.parametrize(
    ("text", "trips"),
    [
        (loop(*KNOWN), 7),
        (loop(condition(INDEX, OTHER, FIVE, "ROOT %l = pred[] compare(%i, %five), direction=LT")), 5),
        (loop(condition(INDEX, FIVE, "ROOT %l = pred[] compare(%five, %i), direction=GT")), 5),
        (loop(FUSED + condition(INDEX, FIVE, "ROOT %l = pred[] fusion(%i, %five), kind=kLoop, calls=%compared")), 5),
    ],
)
def test_what_a_loop_does_counts_as_often_as_it_runs(text, trips):
    found = read(text, unknown_trips=1000)
    assert found.total == Traffic(trips, 256 * trips, 128 * trips)
    assert found.matmul_flops == trips * 2 * 4 * 4 * 8
    assert found.unknown_loops == ()


@pytest.mark.parametrize(
    "lines",
    [
        (INDEX, BOUND, OTHER, DATA_DEPENDENT),
        (INDEX, FIVE, "ROOT %l = pred[] compare(%i, %five), direction=NE"),
        (INDEX, "ROOT %l = pred[] not(%i)"),
    ],
)
def test_a_loop_whose_trips_cannot_be_read_is_named_and_counted_as_told(lines):
    found = read(loop(condition(*lines)))
    assert (found.unknown_loops, found.total.count) == (("loop",), 1)
    assert read(loop(condition(*lines)), unknown_trips=3).total == Traffic(3, 3 * 256, 3 * 128)


def test_a_computation_called_twice_counts_twice_and_every_branch_counts():
    inner = """%inner (q: f32[64]) -> f32[64] {
  %q = f32[64]{0} parameter(0)
  ROOT %g = f32[64]{0} all-gather(%q), replica_groups=[4,2]<=[8], dimensions={0}
}
"""
    text = module(
        "%a = f32[64]{0} call(%p), to_apply=%inner",
        "%b = f32[64]{0} call(%a), to_apply=%inner",
        "%c = f32[64]{0} conditional(%p, %a, %b), branch_computations={%inner, %inner}",
        more=inner,
    )
    assert read(text).total.count == 4


def test_collectives_inside_fusions_count_once_a_channel_and_all_reduce_scatter_is_a_reduce_scatter():
    def fused(name: str, channel: int, size: int) -> str:
        return f"""%{name} (q: f32[{size}]) -> f32[{size}] {{
  %q = f32[{size}]{{0}} parameter(0)
  ROOT %{name}.g = f32[{size}]{{0}} all-gather(%q), channel_id={channel}, replica_groups=[4,2]<=[8], dimensions={{0}}
}}
"""

    scatter = """%all-reduce-scatter.1 (q: f32[64]) -> f32[8] {
  %q = f32[64]{0} parameter(0)
  %r = f32[64]{0} all-reduce(%q), channel_id=9, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %s = f32[8]{0} slice(%r), slice={[0:8]}
}
"""
    text = module(
        "%a = f32[64]{0} fusion(%p), kind=kCustom, calls=%first",
        "%b = f32[64]{0} fusion(%p), kind=kCustom, calls=%second",
        "%c = f32[32]{0} fusion(%p), kind=kCustom, calls=%third",
        "%d = f32[8]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1",
        # two different collectives of one channel, in no fusion
        "%e = f32[64]{0} all-gather(%p), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}",
        "%f = f32[64]{0} all-gather(%p), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}",
        more=ADD + scatter + fused("first", 4, 64) + fused("second", 4, 64) + fused("third", 5, 32),
    )
    gathers = Traffic(4, 3 * 256 + 128, 3 * 128 + 64)
    assert read(text).by_kind == {"all-gather": gathers, "reduce-scatter": Traffic(1, 32, 224)}


def test_estimated_cycles_are_multiplied_by_trips_and_custom_calls_counted():
    more = """%body (t: (s32[], f32[64])) -> (s32[], f32[64]) {
  %t = (s32[], f32[64]{0}) parameter(0)
  %f = f32[64]{0} fusion(%t), kind=kLoop, calls=%inside, backend_config={"estimated_cycles":"100"}
  ROOT %out = (s32[], f32[64]{0}) tuple(%t, %f)
}

%inside (q: f32[64]) -> f32[64] {
  %q = f32[64]{0} parameter(0)
  ROOT %k = f32[64]{0} custom-call(%q), custom_call_target="Bitcast", backend_config={"estimated_cycles":"9"}
}

%condition (c: (s32[], f32[64])) -> pred[] {
  %c = (s32[], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(4)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}
"""
    text = module(
        "%loop = (s32[], f32[64]{0}) while(%p), condition=%condition, body=%body",
        'ROOT %x = f32[64]{0} custom-call(%loop), custom_call_target="Other", backend_config={"estimated_cycles":"7"}',
        more=more,
    )
    found = read(text)
    assert found.estimated_cycles == 4 * 100 + 7
    assert found.custom_calls == {"Bitcast": 1, "Other": 1}


def test_a_text_that_is_no_hlo_is_refused():
    with pytest.raises(ValueError, match="no HLO text"):
        read("module @jit_f {\n}\n")


def test_the_counts_of_a_compiled_program():
    """Three layers that each sum over `model`, then as many gathers over `data` as an argument says."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def body(x, w, times):
        def layer(h, _):
            return jax.lax.psum(jnp.tanh(h) @ w, "model"), None

        h, _ = jax.lax.scan(layer, jax.lax.pcast(x, "model", to="varying") * 0 + x, None, length=3)
        return jax.lax.fori_loop(0, times, lambda _, h: jax.lax.all_gather(h, "data")[0] * 0.5, h)

    f = jax.shard_map(body, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P(), check_vma=False)
    described = (
        jax.ShapeDtypeStruct((16, 32), "f4"),
        jax.ShapeDtypeStruct((32, 32), "f4"),
        jax.ShapeDtypeStruct((), "i4"),
    )
    compiled = jax.jit(f).lower(*described).compile()
    found = read(compiled.as_text(), unknown_trips=10)
    size = 16 * 32 * 4
    assert found.by_kind == {
        "all-reduce": Traffic(3, 3 * size, 3 * 2 * size * 3 // 4),
        "all-gather": Traffic(10, 10 * 2 * size, 10 * size),
    }
    assert len(found.unknown_loops) == 1
    assert found.matmul_flops == 3 * 2 * 16 * 32 * 32
    assert memory(compiled)["argument"] == size + 32 * 32 * 4 + 4


def test_rows_hold_their_bars_or_not_and_are_written_as_json(tmp_path, capsys):
    at = {"V": 64}
    rows = [
        Row.at_most("b", "ours", at, "temp", 2.0, "MiB", 2.0),
        Row("b", "theirs", at, "temp", 3.5, "MiB"),
        Row.left_out("b", "gone", at, "does not import"),
    ]
    assert report(rows, str(tmp_path / "rows.json"), "Title") is True
    written = json.loads((tmp_path / "rows.json").read_text())
    common = {"benchmark": "b", "setting": at}
    assert written == [
        common | {"library": "ours", "metric": "temp", "value": 2.0, "unit": "MiB", "bar": 2.0, "holds": True},
        common | {"library": "theirs", "metric": "temp", "value": 3.5, "unit": "MiB"},
        common | {"library": "gone", "metric": "not measured", "value": None, "unit": "does not import"},
    ]
    assert "Title" in capsys.readouterr().out
    missed = [Row.at_most("b", "ours", at, "temp", value, "MiB", 2.0) for value in (2.1, float("nan"))]
    assert report(missed, "-") is False
    out, err = capsys.readouterr()
    assert [row["holds"] for row in json.loads(out)] == [False, False]
    assert err.count("MISSED") == 2


def test_counting_reporting_and_asking_do_not_import_jax():
    code = "import sys, _hlo, _peers, _report, _worker; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True)


WORKER = """
import sys
from _worker import Channel, stopwatch
channel = Channel()
channel.say({"ready": True})
for request in channel.requests():
    print("a library that prints to stdout")
    with stopwatch() as found:
        sum(range(request["count"]))
    channel.say({"sum": sum(range(request["count"]))} | found)
    if request["count"] == 7:
        sys.exit("seven is too much")
"""


def test_a_worker_answers_in_turn_and_its_end_is_told():
    with Worker([sys.executable, "-c", WORKER], {"PYTHONPATH": str(BENCHMARKS)}) as worker:
        assert worker.hear(timeout=600) == {"ready": True}
        answer = worker.ask({"count": 5}, timeout=600)
        assert answer["sum"] == 10
        assert 0 <= answer["cpu_s"] < 10
        assert worker.ask({"count": 7}, timeout=600)["sum"] == 21
        with pytest.raises(WorkerFailed, match=r"ended with code 1: seven is too much"):
            worker.ask({"count": 5}, timeout=600)


def test_a_silent_worker_is_not_waited_for_for_ever():
    with Worker([sys.executable, "-c", "input()"]) as worker, pytest.raises(WorkerFailed, match="said nothing"):
        worker.hear(timeout=0.1)


def test_an_environment_is_used_again_and_one_that_cannot_be_made_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peer = _peers.Peer("some", ("some==1",), "some")
    assert peer.folder.parent == tmp_path / "spmd_distill" / "peers"
    assert _peers.Peer("some", ("some==2",), "some").folder != peer.folder
    peer.folder.mkdir(parents=True)
    (peer.folder / _peers.COMPLETE).touch()
    monkeypatch.setattr(_peers.sys, "executable", str(tmp_path / "no-such-python"))
    assert _peers.environment(peer) == peer.folder / "bin" / "python"  # nothing is run for it
    (peer.folder / _peers.COMPLETE).unlink()
    with pytest.raises(_peers.Unavailable, match=r"some could not be installed: .*no-such-python"):
        _peers.environment(peer)
    assert not peer.folder.exists()
    assert "Installing some==1" in capsys.readouterr().err


def test_every_second_row_of_the_workload_ends_in_padding():
    work = Workload(vocab=100, batch=4, length=16)
    for _, (tokens, mask) in zip(range(3), work.batches(), strict=False):
        assert mask[::2].all()
        assert all(8 <= row.sum() <= 12 for row in mask[1::2])
        assert ((tokens > 0) == mask).all()
    assert (next(work.batches(1))[0] == next(work.batches(1))[0]).all()
    assert (next(work.batches(1))[0] != next(work.batches(2))[0]).any()


def test_the_loop_and_the_step_alone_take_turns_on_the_same_batches():
    taken = []

    def step(state, batch):
        taken.append((int(state), batch))
        return state + 1, {}

    turns = of_loop.Turns(step, rounds=2, block=2)
    state = jnp.int32(0)
    with pytest.raises(of_loop.Done):
        for batch in range(20):
            state, _ = turns(state, batch)
    first = [(k, k) for k in range(of_loop.WARM)]
    assert taken[: len(first)] == first
    n = of_loop.WARM  # the state alone is that of the loop before its first block, and has a step behind it
    alone = [(n + 1, n), (n + 2, n + 1)], [(n + 3, n + 2), (n + 4, n + 3)]
    assert taken[n:] == [(n, n), *((k, k) for k in (n, n + 1)), *alone[0], *((k, k) for k in (n + 2, n + 3)), *alone[1]]
    assert len(turns.pairs) == 2 and len(turns.between) == 4


def test_the_loop_is_measured_in_a_whole_run(tmp_path):
    rows = list(of_loop.measure(tiny_run(tmp_path, *of_loop.SETTINGS), rounds=2, block=2))
    assert all(row.value >= 0 for row in rows)
    assert {row.metric: row.bar for row in rows if row.bar is not None} == {
        "between two steps": of_loop.BAR,
        "CPU time in the loop": 1 + of_loop.BAR,
        "wall clock in the loop": 1 + of_loop.BAR,
    }
    assert {row.unit for row in rows} == {"ms", "of the step alone", "times the step alone"}
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == []


OF_PEERS = ("_tunix_worker", "_head_torch_worker")
"""These run in environments of their own, with what the tests' environment need not have."""


@pytest.mark.parametrize("name", sorted({p.stem for p in BENCHMARKS.glob("*.py")} - {*OF_PEERS}))
def test_every_script_prints_its_help_and_every_part_of_one_is_imported(name):
    """So that a name of the library that is gone shows without a run."""
    script = [str(BENCHMARKS / f"{name}.py"), "--help"]
    command = [sys.executable, *(["-c", f"import {name}"] if name.startswith("_") else script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS)
    assert done.returncode == 0, done.stderr
