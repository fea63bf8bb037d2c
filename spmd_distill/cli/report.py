"""``spmd-distill report``: runs as one HTML page."""

import argparse
import os
from pathlib import Path
from typing import Any

from spmd_distill.cli.common import say
from spmd_distill.errors import UserError


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser("report", help="write one HTML page about a run, or several side by side")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders; also of runs that are not finished")
    parser.add_argument(
        "--out", metavar="FILE", default=None, help="default: report.html in the run's folder, or here for several"
    )
    parser.set_defaults(act=act)


def act(options: argparse.Namespace, _: list[str]) -> int:
    """Write the page."""
    from spmd_distill.report import MARK, page, read_runs

    runs = read_runs(options.runs)
    out = Path(options.out) if options.out else (runs[0].path if len(runs) == 1 else Path()) / "report.html"
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        if out.exists() and MARK not in out.read_text(encoding="utf-8", errors="replace")[:1000]:
            raise UserError(f"{out}: is there already, and is no report. Give another --out.")
        try:
            draft.write_text(page(runs), encoding="utf-8")
            os.replace(draft, out)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}. Give another --out.") from error
    say(f"Wrote {out}: open it in a browser. It holds everything it needs.")
    return 0
