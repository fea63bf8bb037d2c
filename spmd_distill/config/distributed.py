"""Settings of a run by several processes: how they find each other."""

from dataclasses import dataclass

from spmd_distill.errors import UserError


@dataclass(frozen=True)
class DistributedConfig:
    """How a process finds the others of its group. Nothing set: it is alone.

    What stands in the environment (``SPMD_DISTILL_COORDINATOR`` and so on, a name a field) comes before the run file:
    whoever starts processes on many hosts knows better than a file that all of them read.
    """

    coordinator: str | None = None
    """``host:port`` of process 0, which listens there."""
    processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    auto: bool = False
    """Let JAX find out what is not set: it knows Slurm, TPU pods, Kubernetes and Open MPI."""
    timeout: int = 300
    """Seconds within which all processes must have come together."""
    heartbeat: int = 100
    """Seconds of silence after which a process counts as dead, and the others end too."""

    def check(self) -> None:
        """Raise `UserError` for what contradicts itself."""
        for name in ("processes", "timeout", "heartbeat"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"distributed.{name} is {value}; it must be at least 1.")
        if self.process_id is not None and self.process_id < 0:
            raise UserError(f"distributed.process_id is {self.process_id}; it must be at least 0.")
        if None not in (self.processes, self.process_id) and self.process_id >= self.processes:  # type: ignore[operator]
            raise UserError(
                f"distributed.process_id is {self.process_id} in a group of {self.processes}; they are numbered 0 to "
                f"{self.processes - 1}."  # type: ignore[operator]
            )
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise UserError(
                    f"distributed.coordinator is {self.coordinator!r}; expected host:port, such as node0:8476."
                )
