"""Settings of what watches a run: it counts, skips, repairs, warns or stops."""

from dataclasses import dataclass
from typing import Any, Literal

from spmd_distill.errors import UserError


@dataclass(frozen=True)
class GuardsConfig:
    """All guards are on; each can be turned off."""

    clip: bool = True
    """Count the steps whose gradient ``optimizer.clip_norm`` clipped."""
    nonfinite_in_row: int | None = 5
    """A step whose loss or gradient is not finite is skipped: parameters and optimizer stay as they are. So many in a
    row end the run. Null trains on whatever comes."""
    teacher: bool = True
    """A teacher that is not finite on a token of the loss ends the run, naming the rows, before anything learns it."""
    spike: Literal["off", "warn", "skip", "stop"] = "warn"
    """What happens at a loss above ``spike_factor`` times the running median. ``skip`` leaves the update out."""
    spike_factor: float = 3.0
    """How many times the running median a loss may be, more than 1."""
    spike_window: int = 50
    """Steps that the median runs over. Until so many are there, nothing is judged."""
    memory: float | None = 0.8
    """The share of a device's memory that the training step may need. More is refused before it starts, with a change
    that needs less. Null turns it off."""
    device_memory_gib: float | None = None
    """GiB that a device has, where that is not known or not all ours. Null asks the device; a CPU does not say."""
    out_of_memory: Literal["halve", "stop"] = "halve"
    """What happens when a device runs out of memory all the same. ``halve`` cuts ``data.rows`` and doubles
    ``data.micro_batches``, as often as needed: the same samples and the same gradient in smaller pieces."""
    communication: float | None = 0.2
    """The share of the devices' time that collectives may take while nothing else runs. More is said once, with the
    layout that would move least. Null turns it off."""
    utilisation: float | None = 0.85
    """The share of the time in which the devices should be at work. Less is said once. Null turns it off."""
    profile_steps: int | None = 5
    """Steps whose profile these two are measured in, once a session, soon after its beginning. Not done on a CPU, whose
    devices share their cores. Null turns it off."""

    def check(self) -> None:
        """Raise `UserError` for a number that no guard can use."""
        for name in ("nonfinite_in_row", "spike_window", "profile_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _wrong(name, value, "at least 1" + (", or null" if name != "spike_window" else ""))
        if not self.spike_factor > 1:
            raise _wrong("spike_factor", self.spike_factor, "more than 1")
        for name in ("memory", "communication", "utilisation"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise _wrong(name, value, "a share above 0 and at most 1, or null")
        if self.device_memory_gib is not None and not self.device_memory_gib > 0:
            raise _wrong("device_memory_gib", self.device_memory_gib, "more than 0, or null")


def _wrong(name: str, value: Any, expected: str) -> UserError:
    return UserError(f"Run file: guards.{name} is {value}; it must be {expected}.")
