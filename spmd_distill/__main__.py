"""``python -m spmd_distill``: the command ``spmd-distill``."""

from spmd_distill.cli import command

command()
