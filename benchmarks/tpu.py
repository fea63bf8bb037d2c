"""The head and the training step as the TPU's compiler sees them: memory, traffic and its own estimates of time.

``python benchmarks/tpu.py [--head] [--step] [--json PATH]`` compiles for a TPU v5e of 2 x 4 chips on any machine. No
TPU is needed and NOTHING IS RUN OR TIMED ON ONE. What is needed is XLA's compiler for it, libtpu, from ``pip install
'spmd_distill[tpu-aot]'`` or ``pip install 'jax[tpu]'``; without it all rows are left out and the exit code is 0.

``--head`` is the head alone, 16384 tokens and a vocabulary of 128256 on dp2_tp4, beside one that makes full logits
(half a minute a program). ``--step`` is `Distillation.train_step` with Llama 3.1 8B as teacher and Llama 3.2 1B as
student, at ``--batches`` 8 and 64, on fsdp2_tp4 and fsdp4_tp2 (some minutes a program). Without either flag both are
done. ``--buffers MIB`` lists what is alive where the temporaries are largest.

How far to trust it: bytes are what the compiler allocates and what a ring would move, and are exact in that sense.
Seconds are two estimates that differ by half at times, and no measurement says which is nearer a chip; compare them
only with each other. Neither holds the time of the interconnect, which has a row of its own: bytes on the wire over one
link of 45 GB/s, as if nothing overlapped. All tokens are taken as valid. The exit code is 1 if one of our rows misses
its bar.
"""

import argparse
import contextlib
import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _report import OURS, Row, report
from _tpu_compile import NoCompiler, devices, prepare

NOTES = """\
How the figures are made. Temporaries, arguments and outputs are the compiler's memory plan for one of the chips; what
it places in VMEM is not among them. "optimal" is XLA's roofline, its loop over chunks multiplied out; "cycles" is the
sum of the backend's estimated cycles, loops multiplied out, at 1.5 GHz. Neither knows the interconnect: "on the wire,
one link" is the bytes of ring collectives over 45 GB/s. "MXU ideal" is the flops of the matmuls over 197 TFLOP/s.
Nothing was run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", action="store_true", help="the head alone")
    parser.add_argument("--step", action="store_true", help="the whole training step")
    parser.add_argument("--topology", default="v5e:2x4", help="the constants of the estimates are v5e's")
    parser.add_argument("--layouts", nargs="+", help="of --step: fsdp2_tp4 and fsdp4_tp2; of --head: dp2_tp4")
    parser.add_argument("--chunk", type=int, help="tokens a chunk of our head")
    parser.add_argument("--budget", type=float, help="memory of our head's chunks, in MiB")
    parser.add_argument("--logits-dtype", choices=["float32", "bfloat16"], help="of our head's chunks")
    parser.add_argument("--tokens", type=int, default=16384, help="of --head")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64], help="rows of --step")
    parser.add_argument("--length", type=int, default=2048, help="tokens a row of --step")
    parser.add_argument("--remats", nargs="+", help="of --step: sums up to 8 rows, full beyond")
    parser.add_argument("--micro-batches", type=int, default=1, help="of --step")
    parser.add_argument("--buffers", type=float, metavar="MIB", help="list buffers of that size at the peak")
    parser.add_argument("--json", metavar="PATH", help="also as JSON; - is stdout")
    options = parser.parse_args()
    both = not (options.head or options.step)
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) if options.buffers else None
        prepare(dump)
        rows: list[Row] = []
        try:
            chips = devices(options.topology)
        except NoCompiler as error:
            rows.append(Row.left_out("tpu", OURS, {}, str(error)))
        else:
            if options.head or both:
                rows += head(options, chips)
            if options.step or both:
                rows += step(options, chips)
        held = report(rows, options.json, f"Compiled for {options.topology}, per chip ({versions()})")
        if any(row.value is not None for row in rows):
            print(NOTES, file=sys.stderr)
        if dump is not None:
            from _tpu_buffers import largest

            print("\n".join(largest(dump, options.buffers)), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(not held)


def head(options: argparse.Namespace, chips: list[Any]) -> Iterator[Row]:
    import _tpu_head
    from _tpu_head import HeadProblem, Heads

    for layout in options.layouts or ["dp2_tp4"]:
        heads = Heads(HeadProblem(options.tokens), mapper(layout, chips), our_head(options))
        with said(f"the head on {layout}"):
            yield from list(_tpu_head.rows(heads, setting_of(layout, options)))


def step(options: argparse.Namespace, chips: list[Any]) -> Iterator[Row]:
    import _tpu_step
    from _tpu_step import StepProblem

    for layout in options.layouts or ["fsdp2_tp4", "fsdp4_tp2"]:
        for batch in options.batches:
            for remat in options.remats or ["sums" if batch <= 8 else "full"]:
                problem = StepProblem(batch, options.length, remat, options.micro_batches)
                with said(f"the step on {layout}, batch {batch}, remat {remat}"):
                    yield from list(
                        _tpu_step.rows(problem, mapper(layout, chips), our_head(options), setting_of(layout, options))
                    )


def mapper(layout: str, chips: list[Any]) -> Any:
    from spmd_distill.mappers import make_mapper

    return make_mapper("shard_map", layout, chips)


def our_head(options: argparse.Namespace) -> Any:
    from spmd_distill.head import FusedHead

    budget = int(options.budget * 2**20) if options.budget else None
    return FusedHead(options.chunk, budget, logits_dtype=options.logits_dtype)


def setting_of(layout: str, options: argparse.Namespace) -> dict[str, Any]:
    return {"mesh": layout} | ({"logits": options.logits_dtype} if options.logits_dtype else {})


@contextlib.contextmanager
def said(what: str) -> Iterator[None]:
    """Say what is being compiled, and how long it took."""
    print(f"Compiling {what} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    yield
    print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def versions() -> str:
    def one(package: str) -> str:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"no {package}"

    return ", ".join(map(one, ("jax", "libtpu")))


if __name__ == "__main__":
    main()
