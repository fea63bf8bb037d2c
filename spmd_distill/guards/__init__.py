"""What watches a run: it stops, repairs or warns, and says so."""

from spmd_distill.guards.signals import StopSignal

__all__ = ["StopSignal"]
