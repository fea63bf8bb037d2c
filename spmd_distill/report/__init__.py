"""One HTML page about one run or several, that needs nothing else to be looked at."""

from spmd_distill.report.page import MARK, page
from spmd_distill.report.read import Run, read_run, read_runs

__all__ = ["MARK", "Run", "page", "read_run", "read_runs"]
