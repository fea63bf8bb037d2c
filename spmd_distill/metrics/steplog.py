"""The numbers of training steps on their way from devices to lines: fetched late, all of them, in order.

A step's metrics are small arrays that its program leaves on the devices. To look at them is to wait for the step, so
that on an accelerator those of step k are fetched while step k + 1 runs (``lag=1``): the device always has work. On a
CPU every step is waited for anyway (``lag=0``).

With ``every=N`` they are fetched once in N steps, together, and a line of ``metrics.jsonl`` pools them: sums are added
to sums and counts to counts, so that a line's loss is the mean over the valid tokens of all its steps. Evaluations and
checkpoints end a line early, so that a resumed run goes on with a new one.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from spmd_distill.metrics.table import perplexity
from spmd_distill.metrics.throughput import Meter
from spmd_distill.types import Metrics


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Averages on the host by the names of ``metrics.jsonl``, perplexities among them."""
    return averages(on_host([metrics])[0])


def on_host(metrics: list[Metrics]) -> list[dict[str, tuple[float, float]]]:
    """Every metric's (sum, count) as Python numbers, by one transfer for all."""
    return [
        {name: (float(mean.sum), float(mean.count)) for name, mean in found.items()}
        for found in jax.device_get(metrics)
    ]


def averages(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """``sum / count``, 0 where nothing was counted, and the perplexities of cross entropies."""
    values = {name: total / count if count > 0 else 0.0 for name, (total, count) in sums.items()}
    named = {name: values[f"ce_{name}"] for name in ("student", "teacher") if f"ce_{name}" in values}
    return values | {f"perplexity_{name}": perplexity(value) for name, value in named.items()}


@dataclass(frozen=True)
class Seen:
    """A step whose values are on the host."""

    step: int
    values: dict[str, float]
    """This step's own averages."""
    tokens: int
    """Valid tokens trained on up to this step."""
    line: dict[str, float] | None
    """What a line at this step says, averages over the steps since the last line and rates; None where none is due."""


class StepLog:
    """Holds what steps left on the devices until it is time to look."""

    def __init__(
        self,
        meter: Meter,
        *,
        every: int = 1,
        look: int | None = None,
        lag: int = 0,
        tokens: int = 0,
    ):
        """Begin a session.

        Args:
            meter: the clock.
            every: a line once in so many steps.
            look: steps are looked at once in so many; None: whenever a line is due.
            lag: how many steps behind the one that was handed over last are looked at.
            tokens: valid tokens trained on before.
        """
        self.meter, self.tokens = meter, tokens
        self._every, self._look, self._lag = every, look or every, lag
        self._pending: deque[tuple[int, Metrics]] = deque()
        self._pool: dict[str, tuple[float, float]] = {}
        self._warm = False

    def add(self, step: int, metrics: Metrics) -> list[Seen]:
        """Hand over what a step left, before it has run; what comes back are the steps to look at now."""
        self._pending.append((step, metrics))
        ready = [k for k, _ in self._pending if k <= step - self._lag]
        due = [k for k in ready if k % self._look == 0 or not self._warm]
        return self._fetch(ready.index(due[-1]) + 1, settle=False) if due else []

    def settle(self) -> list[Seen]:
        """Wait for all steps that were handed over, end the line, and stop the clock until the next batch."""
        seen = self._fetch(len(self._pending), settle=True)
        self.meter.stop()
        return seen

    def _fetch(self, count: int, settle: bool) -> list[Seen]:
        taken = [self._pending.popleft() for _ in range(count)]
        found = []
        for (step, _), sums in zip(taken, on_host([metrics for _, metrics in taken]), strict=True):
            self._add(sums)
            tokens = int(sums["loss"][1])
            self.tokens += tokens
            if self._warm:
                self.meter.count(tokens)
            values = averages(sums)
            last = settle and step == taken[-1][0]
            line = None
            if step % self._every == 0 or last or not math.isfinite(values["loss"]):
                line = averages(self._pool) | {"tokens": self.tokens}
                line |= self.meter.lap() if self._warm else {}
                self._pool = {}
            if not self._warm:
                self._warm = True
                self.meter.restart()
            found.append(Seen(step, values, self.tokens, line))
        return found

    def _add(self, sums: Mapping[str, tuple[float, float]]) -> None:
        for name, (total, count) in sums.items():
            before = self._pool.get(name, (0.0, 0.0))
            self._pool[name] = before[0] + total, before[1] + count
