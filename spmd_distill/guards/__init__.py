"""What watches a run: it stops, repairs or warns, and says so."""

from spmd_distill.guards.signals import Interrupted, StopSignal, leave_at_second_interrupt

__all__ = ["Interrupted", "StopSignal", "leave_at_second_interrupt"]
