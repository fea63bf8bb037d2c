"""Several processes that run one program: how they come together, agree, and hand arrays to and fro.

Every function here does the plain thing where there is one process. All processes of a group call them at the same
places, in the same order, from their main thread.
"""

from spmd_distill.distributed.agree import all_or_none, any_of, barrier, check_same, from_first, is_first
from spmd_distill.distributed.arrays import fetch, held_rows, place, place_rows
from spmd_distill.distributed.group import check_alike, check_devices, join

__all__ = [
    "all_or_none",
    "any_of",
    "barrier",
    "check_alike",
    "check_devices",
    "check_same",
    "fetch",
    "from_first",
    "held_rows",
    "is_first",
    "join",
    "place",
    "place_rows",
]
