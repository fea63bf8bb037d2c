"""``spmd-distill init``: a run file to start from, with every setting and what it means."""

import argparse
from pathlib import Path
from typing import Any

from spmd_distill.cli.common import say
from spmd_distill.config import parse_config
from spmd_distill.config.describe import commented
from spmd_distill.config.source import flatten, read_run_file
from spmd_distill.errors import UserError
from spmd_distill.runtime import run_files_folder

PRESETS = ("cpu", "gpu", "pod")


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "init",
        help="write a commented run file to start from",
        epilog="Any setting can be given as a flag, and is then set in the file: --teacher.path models/mine",
    )
    parser.add_argument("out", nargs="?", metavar="RUN.yaml", default="run.yaml", help="default: %(default)s")
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="what it is for (default: %(default)s)")
    parser.set_defaults(act=act, takes_settings=True)


def act(options: argparse.Namespace, rest: list[str]) -> int:
    """Write the file, unless there is one."""
    out, preset = Path(options.out), run_files_folder() / f"{options.preset}.yaml"
    config = parse_config(rest, preset)
    flags = {argument[2:].partition("=")[0] for argument in rest if argument.startswith("--")}
    active = flatten(read_run_file(preset)[0]).keys() | flags
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(commented(config, active))
    except FileExistsError:
        raise UserError(f"{out}: is there already; give another name, or remove it first.") from None
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}.") from error
    say(
        f"Wrote {out}: the settings of preset {options.preset}, and all others commented out with what they mean.\n"
        f"Next:  spmd-distill train {out} --steps 2 --run runs/trial   (finds most mistakes)\n"
        f"       spmd-distill verify {out}                             (proves the set-up)\n"
        f"       spmd-distill train {out}"
    )
    return 0
