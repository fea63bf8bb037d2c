"""``spmd-distill eval``: how near a student is to its teacher on held-out text."""

import argparse
import json
from pathlib import Path
from typing import Any

from spmd_distill.cli.common import say
from spmd_distill.config import parse_config
from spmd_distill.errors import UserError
from spmd_distill.runtime import devices_of, prepare_jax


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "eval",
        help="score a run's student, or any model, against a teacher",
        epilog="Settings are flags: --data.heldout [chat.jsonl] --eval.rows 256. A model needs --teacher.path too.",
    )
    parser.add_argument("student", metavar="RUN|MODEL", help="a run folder, a Hugging Face folder or a GGUF file")
    parser.add_argument("--step", type=int, metavar="N", help="a run's checkpoint (default: its newest good one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(act=act, takes_settings=True)


def act(options: argparse.Namespace, rest: list[str]) -> int:
    """Score it and print the result."""
    run = (Path(options.student) / "config.yaml").is_file()
    if options.step is not None and not run:
        raise UserError(f"--step {options.step} is a checkpoint of a run, but {options.student} is no run folder.")
    prepare_jax(devices_of(parse_config(rest, Path(options.student) / "config.yaml" if run else None).mesh))
    from rich.console import Console

    from spmd_distill.metrics import comparison_table
    from spmd_distill.runs import evaluate_model, evaluate_run, open_run

    if run:
        opened = open_run(options.student, options.step, rest, say)
        found, where = evaluate_run(opened), {"step": opened.step}
        columns, terms = {f"step {opened.step}": found}, list(opened.setup.run.objective.features)
        if "before" in opened.meta:
            columns = {"before training": opened.meta["before"], **columns}
    else:
        found, where = evaluate_model(options.student, rest, say), {}
        columns, terms = {"student": found}, []
    if options.json:
        print(json.dumps({"student": options.student, **where, **found}))
    else:
        Console().print(comparison_table(columns, terms=terms))
    return 0
