"""Measures a few steps with the profiler, once a session: do the devices work, or wait for each other and for data?"""

import tempfile
from collections.abc import Callable
from typing import Any

import jax

from spmd_distill.config import RunConfig
from spmd_distill.guards.events import Events
from spmd_distill.program import DeviceTime, read_trace

WARM = 5
"""Steps of a session that are left alone first."""


def profiled_steps(config: RunConfig, first: int) -> range:
    """Which optimizer steps of a session that begins after ``first`` are profiled; none where it is too short.

    No evaluation and no checkpoint is among them, nor right before them.
    """
    count = config.guards.profile_steps
    if count is None or (config.guards.communication is None and config.guards.utilisation is None):
        return range(0)
    for start in range(first + 1 + WARM, config.steps - count + 2):
        steps = range(start, start + count)
        between = range(start - 1, steps[-1])
        if not any(step % config.eval.every == 0 or step % config.checkpoint.every == 0 for step in between):
            return steps
    return range(0)


class Profile:
    """Call `before` and `after` around every step. What goes wrong with the profiler is said, and ends nothing."""

    def __init__(
        self, config: RunConfig, events: Events, first: int, quieter: Callable[[], Any], *, enabled: bool = True
    ):
        """Measure as ``config.guards`` says.

        Args:
            config: the run's settings.
            events: takes the warnings.
            first: optimizer steps done when the session began.
            quieter: finds a layout that moves less, see `program.quieter_layout`; called where one is wanted.
            enabled: False measures nothing: on a CPU, and for all processes but one.
        """
        self._guards, self._events, self._quieter = config.guards, events, quieter
        self._steps = profiled_steps(config, first) if enabled else range(0)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def before(self, step: int, state: Any) -> None:
        """``step`` is about to begin from ``state``."""
        if self._steps and step == self._steps[0]:
            try:
                jax.block_until_ready(state)  # earlier steps are none of those that are measured
                self._folder = tempfile.TemporaryDirectory(prefix="spmd_distill")
                jax.profiler.start_trace(self._folder.name)
            except Exception as error:
                self._give_up(step, error)

    def after(self, step: int, left: Any) -> None:
        """``step`` is under way; ``left`` is what it leaves."""
        if self._folder is None or step != self._steps[-1]:
            return
        try:
            jax.block_until_ready(left)
            jax.profiler.stop_trace()
            found = read_trace(self._folder.name)
        except Exception as error:
            self._give_up(step, error)
            return
        self._close()
        if found is not None:
            self.judge(step, found)

    def judge(self, step: int, found: DeviceTime) -> None:
        """Warn of what was measured, where it is over or under the run file's shares."""
        guards = self._guards
        values = {"busy": found.busy, "communication": found.communication, **found.kinds}
        if guards.communication is not None and found.communication > guards.communication:
            kinds = ", ".join(f"{kind} {_percent(share)}" for kind, share in found.kinds.items())
            best, advice = self._quieter(), "no built-in layout for as many devices moves less"
            if best is not None:
                name, theirs, ours = best
                moved, now = theirs / 2**20, ours / 2**20
                advice = f"--mesh {name} would move {moved:.4g} MiB a device and step instead of {now:.4g} MiB"
            message = (
                f"devices only communicate in {_percent(found.communication)} of their time ({kinds}), more than the "
                f"{_percent(guards.communication)} of guards.communication; {advice}"
            )
            self._events.add(step, "communication", message, values, counts=False)
        if guards.utilisation is not None and found.busy < guards.utilisation:
            message = (
                f"devices are at work in {_percent(found.busy)} of the time, less than the "
                f"{_percent(guards.utilisation)} of guards.utilisation; between operations they wait for the host. "
                f"More --data.rows make a step larger; where data_wait is high, more --data.prefetch helps"
            )
            self._events.add(step, "utilisation", message, values, counts=False)

    def _give_up(self, step: int, error: Exception) -> None:
        self._close()
        message = f"the profiler failed ({type(error).__name__}: {error}); utilisation is not measured"
        self._events.add(step, "profile", message, counts=False)

    def _close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
