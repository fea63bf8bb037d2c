"""A loss far above the running median of the latest ones: a warning, a skipped update, or the end of the run."""

import collections
import math
import statistics
from collections.abc import Sequence

from spmd_distill.config import GuardsConfig
from spmd_distill.errors import UserError
from spmd_distill.guards.events import Events
from spmd_distill.guards.finite import FindRows


class SpikeGuard:
    """Compares every loss with ``factor`` times the median of the latest ``window`` losses, once there are so many.

    A spike is among the next steps' latest losses too: a loss that has moved to another level for good is no spike any
    more after half a window.
    """

    name = "spike"

    def __init__(self, config: GuardsConfig, events: Events):
        """Judge as ``config.spike`` says."""
        self._action, self._factor, self._events = config.spike, config.spike_factor, events
        self._losses = collections.deque[float](maxlen=config.spike_window)

    @property
    def limit(self) -> float:
        """The largest loss of the next step that is no spike; infinite where nothing can be said."""
        full = self._action != "off" and len(self._losses) == self._losses.maxlen
        median = statistics.median(self._losses) if full else 0.0
        return self._factor * median if median > 0 else math.inf

    def check(self, step: int, values: dict[str, float], find: FindRows) -> None:
        """Judge the loss of a step.

        Raises:
            UserError: a spike, where the run file says that it ends the run.
        """
        loss, limit = values["loss"], self.limit
        if not math.isfinite(loss):
            return
        self._losses.append(loss)
        if loss <= limit:
            return
        what = f"loss {loss:.4g} is above {self._factor:g} times the running median {limit / self._factor:.4g}"
        done = {"skip": "; its update is skipped", "stop": "; the run stops"}.get(self._action, "")
        self._events.add(step, self.name, f"{what}{done}", {"loss": loss, "limit": limit, "action": self._action})
        if self._action == "stop":
            raise UserError(
                f"Step {step}: the {what}, and guards.spike is stop. The batch was {find(())}. Look at these rows, "
                f"lower optimizer.learning_rate, or set guards.spike to skip or warn; then go on with --resume."
            )

    def state(self) -> list[float]:
        """The latest losses, for a checkpoint."""
        return list(self._losses)

    def restore(self, losses: Sequence[float]) -> None:
        """Go on with what `state` returned."""
        self._losses.clear()
        self._losses.extend(losses)
