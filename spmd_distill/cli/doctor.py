"""``spmd-distill doctor``: what is wrong with this machine, or with the folders of runs."""

import argparse
import json
import os
from contextlib import nullcontext
from typing import Any


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, or run folders and whether their runs can be resumed",
        epilog="Nothing is changed. Exit code: 0, or 1 where there is a problem.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="run folders; none checks the machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(act=act)


def act(options: argparse.Namespace, _: list[str]) -> int:
    """Check, and print what was found."""
    from rich.console import Console

    from spmd_distill.doctor import findings_table, plain, worst

    out, err = Console(), Console(stderr=True)
    with err.status("looking") if err.is_terminal else nullcontext() as status:
        say = (lambda message: None) if status is None else status.update
        if not options.runs:
            from spmd_distill.doctor.machine import check_machine

            findings, reports = check_machine(say), []
        else:
            os.environ["JAX_PLATFORMS"] = "cpu"  # no device is needed, and a run may be using them
            from spmd_distill.doctor.run import check_run

            reports = [check_run(run, say) for run in options.runs]
            findings = [finding for report in reports for finding in report.findings]
    ok = worst(findings) != "problem"
    if options.json:
        about = {"resumable", "step", "command", "sentence"}
        runs = [
            {"run": str(r.path), "findings": plain(r.findings), **{k: v for k, v in vars(r).items() if k in about}}
            for r in reports
        ]
        print(json.dumps({"ok": ok, **({"runs": runs} if options.runs else {"findings": plain(findings)})}))
        return 0 if ok else 1
    if not options.runs:
        out.print(findings_table("This machine", findings))
        problems = sum(finding.status == "problem" for finding in findings)
        out.print(f"{problems} problem(s)." if problems else "Ready.", highlight=False)
    for report in reports:
        out.print(findings_table(str(report.path), report.findings))
        out.print(report.sentence, markup=False, highlight=False, soft_wrap=True)
    return 0 if ok else 1
