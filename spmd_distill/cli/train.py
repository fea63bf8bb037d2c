"""``spmd-distill train``: a run file, or a run to go on with."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmd_distill.cli.common import run
from spmd_distill.config import RunConfig, parse_config
from spmd_distill.errors import UserError

AUTO = ""
"""What ``--resume`` is without a value."""


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "train", help="run a run file", epilog="Any setting can be given as a flag: --optimizer.learning_rate 1e-4"
    )
    parser.add_argument("config", nargs="?", metavar="RUN.yaml", help="the run file")
    parser.add_argument(
        "--resume",
        metavar="DIR",
        nargs="?",
        const=AUTO,
        help="go on with the run in this folder; with a run file, with the one in its folder, or start it",
    )
    parser.add_argument(
        "--allow-changes", action="store_true", help="go on although settings, teacher or held-out text have changed"
    )
    parser.set_defaults(act=act, takes_settings=True)


def act(options: argparse.Namespace, rest: list[str]) -> int:
    """Run the run file."""
    path, folder = _folder(options)
    mode = False if folder is None else True if path is None else "auto"
    return run(settings(options, rest), mode, options.allow_changes)


def settings(options: argparse.Namespace, rest: list[str]) -> RunConfig:
    """The settings of the run. Raises `UserError` for what is wrong with them."""
    path, folder = _folder(options)
    if path is None and not folder:
        raise UserError("train takes a run file, --resume DIR to go on with a run, or both; found neither.")
    if path is not None:
        config = parse_config(rest, path)
        return replace(config, run=folder) if folder else config
    path = Path(str(folder)) / "config.yaml"
    if not path.is_file():
        raise UserError(f"There is no run to go on with in {folder}: it has no config.yaml.")
    return replace(parse_config(rest, path), run=str(folder))


def _folder(options: argparse.Namespace) -> tuple[str | None, str | None]:
    """The run file and the folder to go on with, if these are given; `AUTO` is the run file's own."""
    path, folder = options.config, options.resume
    if path is None and folder is not None and folder.endswith((".yaml", ".yml")) and Path(folder).is_file():
        return folder, AUTO  # train --resume RUN.yaml
    return path, folder
