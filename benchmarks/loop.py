"""What the loop of `spmd-distill train` adds to the time of its steps, on one CPU device.

``python benchmarks/loop.py [--rounds 9] [--block 2] [--json PATH] [--SETTING VALUE ...]`` makes the demo's run, with
settings of a run file on top, without evaluations and checkpoints. In one process and with one compiled step, blocks of
steps in the loop, which reads, places, trains, measures, writes, guards and shows, take turns with the step alone on
the very batches of the block before. Measured are

- milliseconds between two steps in the loop, and of these the wait for data, as ``metrics.jsonl`` has it;
- the time of a block in the loop over that of its neighbour, the median over all pairs: CPU time, and wall clock, which
  says something on a quiet machine only.

The progress goes to a terminal that nobody sees. The exit code is 1 if the loop adds more than 2 % of a step by any of
these.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from _report import OURS, Row, report

from spmd_distill.runtime import prepare_jax, run_files_folder

NAME = "loop"
BAR = 0.02
"""What the loop may add, in parts of the step alone."""
WARM = 3
"""Steps before the first block."""
SETTINGS = (
    "--mesh=single", "--steps=1000000", "--eval.every=1000000", "--eval.rows=4", "--eval.prompts=[]",
    "--checkpoint.every=1000000",
)  # fmt: skip


class Done(Exception):
    """Enough was measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="pairs of blocks")
    parser.add_argument("--block", type=int, default=2, help="steps of a block")
    parser.add_argument("--json", metavar="PATH", help="also as JSON; - is stdout")
    options, settings = parser.parse_known_args()
    prepare_jax(1)
    from spmd_distill.config import parse_config

    with tempfile.TemporaryDirectory() as folder:
        flags = [*SETTINGS, f"--run={folder}/run", *settings]
        config = parse_config(flags, run_files_folder() / "cpu.yaml")
        rows = list(measure(config, options.rounds, options.block))
    raise SystemExit(not report(rows, options.json, "A step in the loop beside the step alone, one CPU device"))


def measure(config: Any, rounds: int, block: int) -> Iterator[Row]:
    """Train as the command does until there are so many pairs of blocks; the rows about them."""
    from spmd_distill import fitting, train

    counted: list[Turns] = []
    compile_step = fitting.compile_train_step

    def counting(*args: Any) -> Any:
        compiled = compile_step(*args)
        counted.append(Turns(compiled.call, rounds, block))
        return replace(compiled, call=counted[0])

    fitting.compile_train_step = counting
    try:
        with open(os.devnull, "w") as nowhere:
            from rich.console import Console

            train.distil(config, console=Console(file=nowhere, force_terminal=True))
    except Done:
        pass
    finally:
        fitting.compile_train_step = compile_step
    (turns,) = counted
    setting = {"mesh": config.mesh, "rows": config.data.rows, "length": config.data.length, "block": block}
    wall, cpu = ([one[i] / other[i] for one, other in turns.pairs] for i in (0, 1))
    alone = statistics.median(other[0] for _, other in turns.pairs) / block
    yield Row(NAME, OURS, setting, "the step alone", 1000 * alone, "ms")
    between = statistics.median(turns.between)
    waited = statistics.median(waits(Path(config.run)))
    yield Row(NAME, OURS, setting, "between two steps", 1000 * between, "ms")
    yield Row(NAME, OURS, setting, "of these waiting for data", 1000 * waited, "ms")
    yield Row.at_most(NAME, OURS, setting, "between two steps", between / alone, "of the step alone", BAR)
    yield Row.at_most(
        NAME, OURS, setting, "CPU time in the loop", statistics.median(cpu), "times the step alone", 1 + BAR
    )
    yield Row.at_most(
        NAME, OURS, setting, "wall clock in the loop", statistics.median(wall), "times the step alone", 1 + BAR
    )


def waits(run: Path) -> list[float]:
    """Seconds that every step waited for its batch, without those that warm up."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["split"] == "train"]
    return [
        line["data_wait"] * (line["tokens"] - before["tokens"]) / line["tokens_per_second"]  # a share of the seconds
        for before, line in zip(lines[WARM - 1 :], lines[WARM:], strict=False)
    ]


@dataclass
class Turns:
    """A compiled step that the loop calls. After every block of calls it takes the same steps by itself."""

    step: Any
    rounds: int
    block: int
    pairs: list[tuple[Sequence[float], Sequence[float]]] = field(default_factory=list)
    """(wall, CPU) seconds of a block in the loop, and of its neighbour."""
    between: list[float] = field(default_factory=list)
    """Wall seconds from the end of a step to the beginning of the next one, inside blocks."""
    _calls: int = 0
    _seen: list[Any] = field(default_factory=list)
    _began: Sequence[float] = ()
    _ended: float = 0.0
    _state: Any = None

    def __call__(self, state: Any, *args: Any) -> Any:
        import jax
        import jax.numpy as jnp

        now = clocks()
        if self._calls > WARM:
            self.between.append(now[0] - self._ended)
        if self._calls == WARM:
            self._state = jax.tree.map(jnp.copy, state)  # the loop's own is donated
            self._take([args])
        elif self._calls > WARM and len(self._seen) == self.block:
            self.pairs.append((since(self._began, now), self._take(self._seen)))
            if len(self.pairs) == self.rounds:
                raise Done
        if self._calls >= WARM and len(self._seen) in (0, self.block):
            self._seen, self._began = [], clocks()
        self._calls += 1
        self._seen += [args] if self._calls > WARM else []
        result = jax.block_until_ready(self.step(state, *args))  # as the loop does next, on a CPU
        self._ended = time.perf_counter()
        return result

    def _take(self, batches: Sequence[Any]) -> Sequence[float]:
        import jax

        began = clocks()
        for args in batches:
            self._state, _ = jax.block_until_ready(self.step(self._state, *args))
        return since(began, clocks())


def clocks() -> Sequence[float]:
    return time.perf_counter(), time.process_time()


def since(began: Sequence[float], ended: Sequence[float]) -> Sequence[float]:
    return [b - a for a, b in zip(began, ended, strict=True)]


if __name__ == "__main__":
    main()
