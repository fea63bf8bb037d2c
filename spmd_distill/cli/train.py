"""``spmd-distill train``: a run file, or a run to go on with."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmd_distill.cli.common import run
from spmd_distill.config import RunConfig, parse_config
from spmd_distill.errors import UserError


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "train", help="run a run file", epilog="Any setting can be given as a flag: --optimizer.learning_rate 1e-4"
    )
    parser.add_argument("config", nargs="?", metavar="RUN.yaml", help="the run file")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in this folder")
    parser.set_defaults(act=act, takes_settings=True)


def act(options: argparse.Namespace, rest: list[str]) -> int:
    """Run the run file."""
    return run(settings(options, rest), resume=options.resume is not None)


def settings(options: argparse.Namespace, rest: list[str]) -> RunConfig:
    """The settings of the run. Raises `UserError` for what is wrong with them."""
    if (options.config is None) == (options.resume is None):
        raise UserError("train takes a run file, or --resume DIR to go on with a run; found both or neither.")
    path = options.config if options.resume is None else Path(options.resume) / "config.yaml"
    if options.resume is not None and not path.is_file():
        raise UserError(f"There is no run to go on with in {options.resume}: it has no config.yaml.")
    config = parse_config(rest, path)
    if options.resume is not None:
        config = replace(config, run=str(options.resume))
    return config
