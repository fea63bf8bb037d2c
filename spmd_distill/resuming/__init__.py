"""What a run must have in common with the one that it goes on with, and how a session of it begins and ends."""

from spmd_distill.resuming.session import Session, resumable
from spmd_distill.resuming.settings import Change, changes, changes_table, check_changes, saved_settings
from spmd_distill.resuming.sources import Sources, difference, fingerprint_weights

__all__ = [
    "Change",
    "Session",
    "Sources",
    "changes",
    "changes_table",
    "check_changes",
    "difference",
    "fingerprint_weights",
    "resumable",
    "saved_settings",
]
