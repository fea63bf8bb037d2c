"""All guards that look at a step once it is done, as the loop sees them."""

from collections.abc import Mapping
from typing import Any

from spmd_distill.config import RunConfig
from spmd_distill.guards.clip import ClipGuard
from spmd_distill.guards.events import Events
from spmd_distill.guards.finite import FindRows, FiniteGuard
from spmd_distill.guards.spike import SpikeGuard
from spmd_distill.optimizer import Skip


def skip_of(config: RunConfig) -> Skip:
    """When the compiled step has to leave everything as it is."""
    guards = config.guards
    return Skip(guards.nonfinite_in_row is not None, guards.teacher, guards.spike == "skip")


class Watch:
    """Counts and judges every step: what it returns depends on the steps alone, so that a resumed run goes on so."""

    def __init__(self, config: RunConfig, events: Events):
        """Watch as ``config.guards`` says."""
        self.events = events
        self._clip = ClipGuard(config.optimizer.clip_norm if config.guards.clip else None, events)
        dynamic = config.precision.loss_scale == "dynamic"
        self._finite, self._spike = FiniteGuard(config.guards, events, dynamic), SpikeGuard(config.guards, events)

    @property
    def limit(self) -> float:
        """The largest loss of the next step that is no spike."""
        return self._spike.limit

    @property
    def skipped(self) -> int:
        """Steps of the run so far that changed nothing."""
        return self.events.totals.get(FiniteGuard.name, 0)

    def measure(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """What the guards add to the metrics of a step."""
        return {**self._clip.measure(step, values), **self._finite.measure(step, values)}

    def check(self, step: int, values: dict[str, float], find: FindRows) -> None:
        """Judge the step; see the guards. Raises `UserError` where one of them ends the run."""
        self._finite.check(step, values, find)
        self._spike.check(step, values, find)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to remember; plain JSON values."""
        return {"totals": self.events.totals, "in_row": self._finite.in_row, "losses": self._spike.state()}

    def goes_on(self, step: int, seconds: float, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint of ``step`` that kept ``state``, ``seconds`` after the run began."""
        state = state or {"totals": {}, "in_row": 0, "losses": []}
        self.events.goes_on(step, seconds, state["totals"])
        self._finite.in_row = state["in_row"]
        self._spike.restore(state["losses"])
