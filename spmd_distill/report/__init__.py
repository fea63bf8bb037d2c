"""One HTML page about one run or several, that needs nothing else to be looked at."""

from spmd_distill.report.page import page
from spmd_distill.report.read import Run, read_run

__all__ = ["Run", "page", "read_run"]
