"""Counts how often the gradient was clipped; the clipping itself is a part of the optimizer."""

import numpy as np

from spmd_distill.guards.events import Events


class ClipGuard:
    """Steps whose gradient was longer than ``clip_norm``. An event each time their number has doubled."""

    name = "clipped"

    def __init__(self, clip_norm: float | None, events: Events):
        """Count into ``events``; ``clip_norm`` None counts nothing."""
        self._norm, self._events = clip_norm, events

    def measure(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """The metrics ``clipped`` (0 or 1) and ``clipped_total`` of a step; a skipped step is not a clipped one."""
        if self._norm is None:
            return {}
        # As the optimizer sees it: both are float32, and a norm that is just the limit is clipped.
        clipped = not values["skipped"] and not np.float32(values["grad_norm"]) < np.float32(self._norm)
        if clipped:
            total = self._events.count(self.name)
            if total & (total - 1) == 0:
                seen = {"grad_norm": values["grad_norm"], "clip_norm": self._norm, "total": total}
                message = f"gradient norm {values['grad_norm']:.4g} clipped to {self._norm:g}, {total} in all"
                self._events.add(step, self.name, message, seen, say=False, counts=False)
        return {self.name: float(clipped), f"{self.name}_total": self._events.totals.get(self.name, 0)}
