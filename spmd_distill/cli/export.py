"""``spmd-distill export``: a run's student as a Hugging Face folder."""

import argparse
from typing import Any

from spmd_distill.cli.common import config_file, say
from spmd_distill.config import parse_config
from spmd_distill.runtime import devices_of, prepare_jax


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "export",
        help="write a run's student as a Hugging Face folder",
        epilog="Settings are flags, for a teacher or a mesh that is elsewhere now: --teacher.path models/mine",
    )
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument("out", metavar="OUT", help="the folder to write: new or empty")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint (default: the newest good one)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as it was trained")
    parser.set_defaults(act=act, takes_settings=True)


def act(options: argparse.Namespace, rest: list[str]) -> int:
    """Write it."""
    prepare_jax(devices_of(parse_config(rest, config_file(options.run)).mesh))
    from spmd_distill.runs import export_run, open_run

    opened = open_run(options.run, options.step, rest, say)
    say(f"Wrote {export_run(opened, options.out, options.dtype)}: the student after {opened.step} steps.")
    return 0
