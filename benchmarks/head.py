"""The loss alone, from hidden states on one device, forward and backward: memory and CPU time of several libraries.

``python benchmarks/head.py [--compile-only] [--json PATH]`` takes 2048 tokens, hidden states of width 256 (student) and
512 (teacher) and a vocabulary of 32768, all by flags, and computes ``alpha T^2 KL + (1 - alpha) CE`` with its gradients
by

- ``naive``: JAX, the formula on full logits; ``optax``: the same of optax's losses;
- spmd_distill: `FusedHead` in a shard body, with a budget of ``--budget`` MiB for its chunks;
- ``trl``: torch, TRL's loss for generalised knowledge distillation at beta 0; ``liger``: Liger-Kernel's chunked loss.

Measured are

- the memory of the JAX ones beyond inputs and gradients, exactly, from the compiled program; and, compiled at three
  numbers of tokens and three vocabularies, by how many bytes it grows with each. Of the torch ones, by how much the
  process grows at its peak in the first call, less the gradients;
- CPU seconds of the whole process, one call of each in turn, with all tokens valid and with half of them masked, over
  those of ``naive`` in the same round: the median of ``--rounds``, after one round that is thrown away;
- the loss, which must be that of ``naive``; and by how much logits held in bfloat16, an option, change the gradients.

The torch ones run in an environment that is installed once; where that fails their rows are left out. ``--no-torch``
leaves them alone. The exit code is 1 if one of our rows misses its bar.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from _head_problem import MASKS, Problem, add_flags, from_flags
from _peers import LIGER, Unavailable, environment
from _report import OURS, Row, report
from _worker import Message, Worker, WorkerFailed

NAME = "head"
MIB = 2**20
JAX = {"naive": "naive jax", "optax": "optax", "ours": OURS}
TORCH = {"trl": "torch, TRL's GKD", "liger": "liger-kernel"}

TOKEN_BAR = 64.0
"""Bytes a token of memory beyond inputs and gradients. A few numbers a token (an order, its inverse, a label) are 64 at
most; one more copy of the hidden states, even of width 32, is not."""
GROWTH_BUDGET = 64
"""MiB that our chunks may take where growth is measured: small, so that a chunk is far from all tokens."""
ROW_BAR = 128.0
"""Bytes a row of the vocabulary. What a chunk of fixed budget loses or gains by rounding to whole tokens stays below it
over the vocabularies measured; one more copy of the student's unembedding (1024 bytes a row) or the logits of as few as
64 tokens do not."""
CPU_BAR = {"all": 1.0, "half": 0.8}
"""CPU seconds over those of the naive loss, by mask."""
LOSS_BAR = 1e-5
"""Relative difference of our loss to the naive one, in float32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--budget", type=int, default=256, help="memory of our head's chunks, in MiB")
    parser.add_argument("--growth-tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="compiled, not run")
    parser.add_argument("--growth-vocabs", type=int, nargs="+", default=[16384, 65536, 262144])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile-only", action="store_true", help="only what is exact; nothing is run")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", metavar="PATH", help="also as JSON; - is stdout")
    options = parser.parse_args()
    problem = from_flags(options)
    rows: list[Row] = []
    with ExitStack() as stack:
        try:
            jax = stack.enter_context(Worker(jax_command(options, problem), {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}))
            rows += memory(jax, problem)
            rows += growth(jax, problem, options.growth_tokens, options.growth_vocabs)
            if not options.compile_only:
                rows += rounded(jax, problem)
                workers = dict.fromkeys(JAX, jax)
                if not options.no_torch:
                    rows += torch_workers(stack, problem, workers)
                rows += timed(workers, problem, options.rounds)
        except WorkerFailed as error:
            rows.append(Row.left_out(NAME, "all", {}, f"a worker {error}"))
    raise SystemExit(not report(rows, options.json, "The loss from hidden states, one device"))


def setting_of(problem: Problem) -> dict[str, Any]:
    return {"N": problem.tokens, "Ds": problem.student, "Dt": problem.teacher, "V": problem.vocab}


# Memory


def beyond(jax: Worker, head: str, problem: Problem, budget: int | None = None) -> int:
    """Bytes a compiled head needs beyond its inputs and the gradients it returns; ``budget`` for ours, in MiB."""
    say(f"compiling {JAX[head]} for {problem.tokens} tokens and a vocabulary of {problem.vocab}")
    found = jax.ask({"memory": head, "budget": budget, **vars(problem)})
    return found["temp"] + found["output"] - problem.gradient_bytes


def memory(jax: Worker, problem: Problem) -> Iterator[Row]:
    for head, library in JAX.items():
        value = beyond(jax, head, problem) / MIB
        yield Row(NAME, library, setting_of(problem), "memory beyond gradients", value, "MiB")


def growth(jax: Worker, problem: Problem, tokens: Sequence[int], vocabs: Sequence[int]) -> Iterator[Row]:
    """The slopes of a straight line through the memory at all numbers of tokens, and at all vocabularies."""
    for name, values, unit, bar in (("tokens", tokens, "a token", TOKEN_BAR), ("vocab", vocabs, "a row", ROW_BAR)):
        for head, library in JAX.items():
            problems = [dataclasses.replace(problem, **{name: value}) for value in values]
            needed = [beyond(jax, head, each, GROWTH_BUDGET) for each in problems]
            slope = float(np.polyfit(values, needed, 1)[0])
            setting = setting_of(problem) | {"N" if name == "tokens" else "V": f"{min(values)} to {max(values)}"}
            row = NAME, library, setting, "growth of memory beyond gradients", slope, f"bytes {unit}"
            yield Row.at_most(*row, bar) if head == "ours" else Row(*row)


# Rounding


def rounded(jax: Worker, problem: Problem) -> Iterator[Row]:
    """What the option to hold a chunk's logits in bfloat16 does to the gradients and the loss."""
    say("logits in bfloat16")
    found = jax.ask({"rounded": "bfloat16"})
    setting = setting_of(problem) | {"logits": "bfloat16"}
    for name, value in found.items():
        yield Row(NAME, OURS, setting, f"relative error of the {name}", value, "")


# Time


def torch_workers(stack: ExitStack, problem: Problem, workers: dict[str, Worker]) -> Iterator[Row]:
    """Start the torch heads; rows for those that cannot be."""
    try:
        python = environment(LIGER)
    except Unavailable as error:
        for library in TORCH.values():
            yield Row.left_out(NAME, library, {}, str(error))
        return
    for head, library in TORCH.items():
        worker = stack.enter_context(
            Worker([python, beside("_head_torch_worker.py"), f"--head={head}", *problem.as_flags()])
        )
        try:
            say(f"{library} {worker.hear()['version']}")
            workers[head] = worker
        except WorkerFailed as error:
            yield Row.left_out(NAME, library, {}, str(error))


def timed(workers: dict[str, Worker], problem: Problem, rounds: int) -> Iterator[Row]:
    answers: dict[tuple[str, str], list[Message]] = {(head, mask): [] for mask in MASKS for head in workers}
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warming up")
        for (head, mask), told in answers.items():
            told.append(workers[head].ask({"time": head, "mask": mask}))
    for (head, mask), told in answers.items():
        library, setting = (JAX | TORCH)[head], setting_of(problem) | {"valid": mask}
        if head in TORCH and mask == "all":
            value = (told[0]["growth"] - problem.gradient_bytes) / MIB
            yield Row(NAME, library, setting, "memory beyond gradients", value, "MiB, of the process")
        yield Row(NAME, library, setting, "CPU time", statistics.median(x["cpu_s"] for x in told[1:]), "s")
        against = answers["naive", mask]
        if head != "naive":
            ratio = statistics.median(a["cpu_s"] / b["cpu_s"] for a, b in zip(told[1:], against[1:], strict=True))
            row = NAME, library, setting, "CPU time over naive", ratio, "ratio"
            yield Row.at_most(*row, CPU_BAR[mask]) if head == "ours" else Row(*row)
        yield from agreement(library, setting, told[-1]["loss"], against[-1]["loss"])


def agreement(library: str, setting: dict[str, Any], loss: float, expected: float) -> Iterator[Row]:
    row = NAME, library, setting, "loss, relative difference to naive", abs(loss - expected) / abs(expected), ""
    yield Row.at_most(*row, LOSS_BAR) if library == OURS else Row(*row)


# Workers


def jax_command(options: argparse.Namespace, problem: Problem) -> list[Any]:
    return [sys.executable, beside("_head_jax_worker.py"), f"--budget={options.budget}", *problem.as_flags()]


def beside(name: str) -> Path:
    return Path(__file__).with_name(name)


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
