"""The command ``spmd-distill``: a module a subcommand. Each reads its arguments before it imports jax.

A module of a subcommand has ``add(commands)``, which declares its arguments and names the function that acts on them:
``act(options, rest) -> exit code``. ``rest`` are arguments that the parser does not know: settings of a run file.
"""

import argparse
import importlib
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence

from spmd_distill.config import setting_names
from spmd_distill.errors import UserError
from spmd_distill.launcher import MISTAKE, USER_MISTAKE

SUBCOMMANDS = ("demo", "init", "train", "launch", "eval", "report", "export", "prune", "verify", "doctor")
"""Modules of this package, in the order that ``spmd-distill --help`` lists them."""
_LAST_THREADS = 5.0
"""Seconds that the threads of a command that failed have to end."""
_PARTING = 3.0
"""Seconds that a process with a mistake waits for the others of its group to have found it too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    0 done, or stopped by a signal with all of it saved; 1 a proof failed, or the doctor found a problem; 2 a mistake
    of the user's; 130 interrupted.
    """
    parser = build_parser()
    words, spaced = join_settings(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser.parse_known_args(words)
    rest += spaced
    if rest and not getattr(options, "takes_settings", False):
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax prints tracebacks of what we report in a sentence
    try:
        return options.act(options, rest)
    except UserError as error:
        print(f"{MISTAKE}{error}", file=sys.stderr)
        return _leave(USER_MISTAKE, together=True)
    except KeyboardInterrupt as stop:
        print(f"\nspmd-distill: {stop or 'interrupted'}", file=sys.stderr)
        return getattr(stop, "code", 130) if str(stop) else _leave(130)
    except Exception:
        if not _in_group():
            raise
        traceback.print_exc()
        return _leave(1)


def command() -> None:
    """The process of the command: it ends with the exit code of `main`, whatever a save that failed has left behind.

    Where a save fails under way, threads of orbax may wait for ever for what will not come, and Python for them; and
    tensorstore reports to an event loop that is closed by then.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # futures of a failed save that nobody asks any more
    unraisable = sys.unraisablehook
    sys.unraisablehook = lambda found: None if "Event loop is closed" in str(found.exc_value) else unraisable(found)
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    if code:
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        deadline = time.monotonic() + _LAST_THREADS
        while (waiting := _waiting()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if waiting:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)


def _waiting() -> bool:
    """Whether Python would wait for a thread before it ends."""
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    return any(not thread.daemon for thread in others)


def _leave(code: int, together: bool = False) -> int:
    """The exit code. A process of a group ends at once: the others may be in a collective that it never joins.

    ``together``: the others may have found the same, and have a moment to say so. JAX aborts, with a stack trace,
    whoever finds process 0 gone.
    """
    if _in_group():
        if together:
            parting = threading.Thread(target=sys.modules["jax"].distributed.shutdown, daemon=True)
            parting.start()
            parting.join(_PARTING)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _in_group() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def join_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """``--mesh dp8`` as ``--mesh=dp8`` for subcommands that know no setting, and would take dp8 for a file.

    Settings with a space in them come apart from the rest: argparse would take the whole word for a file.
    """
    if not arguments or arguments[0] not in ("train", "eval", "export", "init"):
        return list(arguments), []
    names, joined, spaced, rest = tuple(setting_names()), [], [], list(arguments)
    while rest:
        word = rest.pop(0)
        name = word.removeprefix("--").partition("=")[0].rstrip("+")
        setting = word.startswith("--") and (name in names or name.startswith(tuple(f"{n}." for n in names)))
        word = f"{word}={rest.pop(0)}" if setting and rest and "=" not in word else word
        (spaced if setting and " " in word else joined).append(word)
    return joined, spaced


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="spmd-distill",
        description="Distil a large language model into a small one, sharded, and prove it.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in SUBCOMMANDS:
        importlib.import_module(f"{__name__}.{name}").add(commands)
    return parser
