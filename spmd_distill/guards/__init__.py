"""What watches a run: it counts, skips, repairs, warns or stops, and says so. One file a guard."""

from spmd_distill.guards.events import Event, Events, read_events
from spmd_distill.guards.exhausted import first_line, halved, is_out_of_memory
from spmd_distill.guards.finite import find_rows, name_rows
from spmd_distill.guards.memory import check_memory
from spmd_distill.guards.profile import Profile
from spmd_distill.guards.signals import Interrupted, StopSignal, leave_at_second_interrupt
from spmd_distill.guards.watch import Watch, skip_of

__all__ = [
    "Event",
    "Events",
    "Interrupted",
    "Profile",
    "StopSignal",
    "Watch",
    "check_memory",
    "find_rows",
    "first_line",
    "halved",
    "is_out_of_memory",
    "leave_at_second_interrupt",
    "name_rows",
    "read_events",
    "skip_of",
]
