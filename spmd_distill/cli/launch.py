"""``spmd-distill launch``: a command as several processes on this machine."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmd_distill.cli import demo, train
from spmd_distill.config import RunConfig
from spmd_distill.errors import UserError
from spmd_distill.launcher import Group, Launcher
from spmd_distill.runtime import SIMULATED_DEVICES

COMMANDS = {"train": train, "demo": demo}


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "launch",
        help="run train or demo as several processes on this machine, and again if one dies",
        usage="spmd-distill launch [options] {train,demo} ...",
        epilog="Options stand before the command, for example: launch -n 2 train run.yaml",
    )
    parser.add_argument("-n", "--processes", type=int, default=2, metavar="N", help="how many (default %(default)s)")
    parser.add_argument("--devices-per-process", type=int, metavar="N", help="simulated CPU devices (default: 8 / N)")
    parser.add_argument("--max-restarts", type=int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--heartbeat", type=int, default=30, metavar="SECONDS", help="silence that counts as death (default 30)"
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="COMMAND", help="train or demo, as without launch"
    )
    parser.set_defaults(act=act)


def act(options: argparse.Namespace, _: list[str]) -> int:
    """Start the group, after the command's own arguments are checked here, once."""
    for name, least in (("processes", 1), ("devices_per_process", 1), ("max_restarts", 0), ("heartbeat", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}.")
    given: list[str] = options.arguments
    config = settings(given)
    devices = options.devices_per_process or max(1, SIMULATED_DEVICES // options.processes)
    group = Group(options.processes, devices, options.max_restarts, options.heartbeat)
    launcher, begun = Launcher(group), False

    def command() -> Sequence[str]:
        nonlocal begun
        again, begun = begun, True
        return restarted(given, config.run) if again else given

    return launcher.run(command)


def settings(given: Sequence[str]) -> RunConfig:
    """The settings of a command that is to be launched. Raises `UserError` for what is wrong with them."""
    if not given or given[0] not in COMMANDS:
        found = f"{given[0]!r}" if given else "nothing"
        raise UserError(f"launch takes a command, {' or '.join(COMMANDS)}, after its own options; found {found}.")
    parser = argparse.ArgumentParser(prog="spmd-distill launch", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command")
    for module in COMMANDS.values():
        module.add(commands)
    options, rest = parser.parse_known_args(given)
    if rest and not getattr(options, "takes_settings", False):
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    return COMMANDS[given[0]].settings(options, rest)


def restarted(given: Sequence[str], run: str) -> Sequence[str]:
    """The arguments that go on with what ``given`` began: from the run folder, where it holds a run already."""
    if "--resume" in given or not (Path(run) / "config.yaml").is_file():
        return given
    return ["train", "--resume", run]
