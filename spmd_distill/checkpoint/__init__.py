"""Checkpoints that cannot lie, and what a folder of them holds.

`Checkpoints` writes and restores; `reading` looks at a folder without opening it for a run.
"""

from spmd_distill.checkpoint.checkpoints import Checkpoints
from spmd_distill.checkpoint.fitting import is_of_the_disk
from spmd_distill.checkpoint.keeping import Mark
from spmd_distill.checkpoint.manifest import verify_step
from spmd_distill.checkpoint.reading import finished_steps, leftovers, read_mark, read_meta, steps_there

__all__ = [
    "Checkpoints",
    "Mark",
    "finished_steps",
    "is_of_the_disk",
    "leftovers",
    "read_mark",
    "read_meta",
    "steps_there",
    "verify_step",
]
