"""One distillation step, this library beside google-tunix: memory, collectives, matmuls and CPU time.

``python benchmarks/step.py [--compile-only] [--json PATH]`` trains a student of 4 layers of width 256 from a teacher of
8 layers of width 512 (Llama family, tied, float32, AdamW), on eight CPU devices as 2 x 4, batch 8 x 128 with padding in
every other row. Measured are, per device and step,

- exactly, from the compiled programs: temporaries, arguments and outputs in MiB, collectives and the bytes they put on
  the wire of a ring, and the flops of matmuls. What the optimised program says is what counts: loops are multiplied
  out, and the head's data-dependent loop by what the first batch makes of it;
- by running: CPU seconds of whole processes, for a few steps of each library in turn, again and again. The figure is
  the median of the ratios of neighbours, after one round that is thrown away.

tunix runs two programs a step, the teacher's and the student's. The teacher's logits wait between them, so that what
tunix needs beyond its arguments is the larger of both programs' temporaries and outputs, with the logits in it. It is
installed once, in an environment of its own; where that fails, its rows are left out. ``--no-tunix`` leaves it alone.

The exit code is 1 if one of our rows misses its bar.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _peers import TUNIX, Unavailable, environment
from _report import OURS, Row, report
from _worker import Message, Worker, WorkerFailed

MIB = 2**20
NAME = "step"
THEIRS = "google-tunix"

TEMPORARIES_BAR = {("fsdp2_tp4", 49152): 80.0, ("fsdp2_tp4", 151936): 160.0}
"""MiB a device, whatever the remat."""
WIRE_BAR = {("fsdp2_tp4", 49152): 100.0, ("dp2_tp4", 49152): 65.0}
"""MiB a device and step."""
CPU_BAR = 0.7
"""CPU seconds of a step of ours over those of tunix."""
GROWTH, A_ROW = "temporaries beyond gradients", "bytes a row of the vocabulary"
GROWTH_BUDGET = 8
"""MiB of the head's chunks where growth is measured: they are then short of half the student's width at any V."""
GROWTH_BAR = 128.0
"""Bytes a row of the vocabulary: one array like a device's part of the unembedding (1024 over 8). The optimizer squares
its gradient, which XLA:CPU writes out; a head whose chunks grew would need a multiple of it."""

ENVIRON = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "NPROC": "32",  # threads of XLA's pool: with fewer than devices a collective may wait for ever
}
"""The same for all libraries."""

Setting = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-only", action="store_true", help="only what is exact; nothing is run")
    parser.add_argument("--no-tunix", action="store_true")
    parser.add_argument("--vocabs", type=int, nargs="+", default=[49152, 151936], help="the first one is timed")
    parser.add_argument("--layouts", nargs="+", default=["fsdp2_tp4", "dp2_tp4"], help="of two axes, data 2 x model 4")
    parser.add_argument("--remats", nargs="+", default=["none", "full"], help="the first one is timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of each library in a round")
    parser.add_argument("--json", metavar="PATH", help="also as JSON; - is stdout")
    options = parser.parse_args()
    rows, peer = [], None
    if not options.no_tunix:
        try:
            peer = environment(TUNIX)
        except Unavailable as error:
            rows.append(Row.left_out(NAME, THEIRS, {}, str(error)))
    rows += exact(options, peer)
    if not options.compile_only:
        rows += timed(options, peer)
    raise SystemExit(not report(rows, options.json, "One distillation step, per device"))


# What is exact


def exact(options: argparse.Namespace, peer: Path | None) -> Iterator[Row]:
    beyond: dict[tuple[str, str], dict[int, float]] = {}
    for vocab in options.vocabs:
        for layout in options.layouts:
            for remat in options.remats:
                setting = {"V": vocab, "layout": layout, "remat": remat}
                facts = compiled(ours(vocab, layout, remat, "--compile-only"), OURS, setting)
                if isinstance(facts, Row):
                    yield facts
                    continue
                yield from our_rows(setting, facts)
                extra = facts["memory"]["temp"] - facts["gradient_bytes"]
                beyond.setdefault((layout, remat), {})[vocab] = extra
        if peer is not None:
            setting = {"V": vocab, "layout": "fsdp2_tp4", "remat": "none"}
            facts = compiled(tunix(peer, vocab, "--compile-only"), THEIRS, setting)
            yield from [facts] if isinstance(facts, Row) else their_rows(setting, facts)
    for (layout, remat), by_vocab in beyond.items():
        if len(by_vocab) > 1:
            setting = {"layout": layout, "remat": remat}
            yield figure(OURS, setting | said(by_vocab), GROWTH, slope(by_vocab), A_ROW)
    if len(options.vocabs) > 1:
        yield from growth(options.vocabs)


def growth(vocabs: Sequence[int]) -> Iterator[Row]:
    """How the temporaries grow where the head's chunks have a budget; the parameters' gradients are left out."""
    by_vocab, layout, remat = {}, "fsdp2_tp4", "full"
    for vocab in vocabs:
        setting = {"V": vocab, "layout": layout, "remat": remat, "budget": f"{GROWTH_BUDGET} MiB"}
        facts = compiled(ours(vocab, layout, remat, "--compile-only", f"--budget={GROWTH_BUDGET}"), OURS, setting)
        if isinstance(facts, Row):
            yield facts
            return
        by_vocab[vocab] = facts["memory"]["temp"] - facts["gradient_bytes"]
    setting = {"layout": layout, "remat": remat, "budget": f"{GROWTH_BUDGET} MiB"}
    yield figure(OURS, setting | said(by_vocab), GROWTH, slope(by_vocab), A_ROW, GROWTH_BAR)


def said(by_vocab: Mapping[int, float]) -> Setting:
    return {"V": f"{min(by_vocab)} to {max(by_vocab)}"}


def slope(by_vocab: Mapping[int, float]) -> float:
    low, high = min(by_vocab), max(by_vocab)
    return (by_vocab[high] - by_vocab[low]) / (high - low)


def our_rows(setting: Setting, facts: Message) -> Iterator[Row]:
    at = (setting["layout"], setting["V"])
    temp = facts["memory"]["temp"]
    yield figure(OURS, setting, "temporaries", temp / MIB, "MiB", TEMPORARIES_BAR.get(at))
    extra = (temp - facts["gradient_bytes"]) / MIB
    yield figure(OURS, setting, "temporaries beyond gradients", extra, "MiB")
    needed = temp + facts["memory"]["output"] - facts["memory"]["alias"]
    yield figure(OURS, setting, "needed beyond arguments", needed / MIB, "MiB")
    yield figure(OURS, setting, "arguments", facts["memory"]["argument"] / MIB, "MiB")
    yield figure(OURS, setting, "outputs in place", facts["memory"]["alias"] / MIB, "MiB")
    yield from sent(OURS, setting, facts, WIRE_BAR.get(at))
    for loop in facts["unknown_loops"]:
        yield Row(NAME, OURS, setting, f"trips of {loop}, from the data", facts["unknown_trips"], "")


def their_rows(setting: Setting, facts: Message) -> Iterator[Row]:
    teacher, step = facts["memory"]["teacher"], facts["memory"]["step"]
    logits = facts["logits"]["passed_on"]
    # Alive while the second program runs: its temporaries, what it returns in new memory, and the logits.
    needed = max(
        teacher["temp"] + teacher["output"] - teacher["alias"], step["temp"] + step["output"] - step["alias"] + logits
    )
    for metric, value in (
        ("temporaries, teacher", teacher["temp"]),
        ("temporaries, student's step", step["temp"]),
        ("teacher's logits between them", logits),
        ("needed beyond arguments", needed),
        ("arguments", teacher["argument"] + step["argument"] - logits),
        ("outputs in place", teacher["alias"] + step["alias"]),
    ):
        yield figure(THEIRS, setting, metric, value / MIB, "MiB")
    yield from sent(THEIRS, setting, facts)
    moved = logits - facts["logits"]["made"]
    yield figure(THEIRS, setting, "logits moved between programs", moved / MIB, "MiB, not in wire bytes")
    for loop in facts["unknown_loops"]:
        yield Row(NAME, THEIRS, setting, f"{loop} counted once", 1, "")


def sent(library: str, setting: Setting, facts: Message, bar: float | None = None) -> Iterator[Row]:
    yield figure(library, setting, "collectives", facts["collectives"], "")
    yield figure(library, setting, "bytes on the wire", facts["wire_bytes"] / MIB, "MiB", bar)
    yield figure(library, setting, "matmuls", facts["matmul_flops"] / 1e9, "GFLOP")


def figure(library: str, setting: Setting, metric: str, value: float, unit: str, bar: float | None = None) -> Row:
    if bar is None:
        return Row(NAME, library, setting, metric, value, unit)
    return Row.at_most(NAME, library, setting, metric, value, unit, bar)


# What is timed


def timed(options: argparse.Namespace, peer: Path | None) -> Iterator[Row]:
    """Let every library make its steps, round after round; the rows of the medians."""
    vocab, remat = options.vocabs[0], options.remats[0]
    commands = {(OURS, layout): ours(vocab, layout, remat) for layout in options.layouts}
    if peer is not None:
        commands[THEIRS, "fsdp2_tp4"] = tunix(peer, vocab)
    with ExitStack() as stack:
        workers: dict[tuple[str, str], Worker] = {}
        for (library, layout), command in commands.items():
            say(f"starting {library}, {layout}")
            worker = stack.enter_context(Worker(command, ENVIRON))
            try:
                worker.hear()
                worker.ask({"steps": 1})  # its first step compiles or allocates what later ones do not
                workers[library, layout] = worker
            except WorkerFailed as error:
                yield Row.left_out(NAME, library, {"V": vocab, "layout": layout}, str(error))
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in workers}
        try:
            for number in range(options.rounds):
                say(f"round {number + 1} of {options.rounds}")
                for key, worker in workers.items():
                    seconds[key].append(worker.ask({"steps": options.steps})["cpu_s"] / options.steps)
        except WorkerFailed as error:
            yield Row.left_out(NAME, "all", {"V": vocab}, f"a worker {error}")
            return
    theirs = seconds.get((THEIRS, "fsdp2_tp4"))
    for (library, layout), taken in seconds.items():
        setting = {"V": vocab, "layout": layout, "remat": remat}
        yield figure(library, setting, "CPU time of a step", statistics.median(taken), "s")
        if library == OURS and theirs is not None:
            ratio = statistics.median(a / b for a, b in zip(taken, theirs, strict=True))
            yield figure(library, setting, "CPU time over tunix's", ratio, "ratio", CPU_BAR)


# Workers


def compiled(command: list[Any], library: str, setting: Setting) -> Message | Row:
    """The first message of a worker, or the row that stands for it where there is none."""
    say(f"compiling {library}, {', '.join(map(str, setting.values()))}")
    try:
        with Worker(command, ENVIRON) as worker:
            return worker.hear()
    except WorkerFailed as error:
        return Row.left_out(NAME, library, setting, str(error))


def ours(vocab: int, layout: str, remat: str, *more: str) -> list[Any]:
    flags = [f"--vocab={vocab}", f"--layout={layout}", f"--remat={remat}", *more]
    return [sys.executable, Path(__file__).with_name("_step_worker.py"), *flags]


def tunix(peer: Path, vocab: int, *more: str) -> list[Any]:
    return [peer, Path(__file__).with_name("_tunix_worker.py"), f"--vocab={vocab}", *more]


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
