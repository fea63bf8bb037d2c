"""``spmd-distill verify``: the proof that no layout and no mapper changes the result."""

import argparse
from typing import Any

from spmd_distill.cli.common import MAPPER_NAMES
from spmd_distill.config import parse_config
from spmd_distill.errors import UserError
from spmd_distill.runtime import devices_of, prepare_jax


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser("verify", help="prove that no layout and no mapper changes the result")
    parser.add_argument("run_file", nargs="?", metavar="RUN.yaml", help="prove the models and settings of a run file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--layouts", metavar="NAME", nargs="+", default=None, help="default: all that fit 8 devices")
    parser.add_argument("--mappers", metavar="NAME", nargs="+", default=list(MAPPER_NAMES))
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float64")
    parser.add_argument("--config", metavar="RUN.yaml", help="the same as RUN.yaml")
    parser.set_defaults(act=act)


def act(options: argparse.Namespace, _: list[str]) -> int:
    """Prove it."""
    wanted = options.layouts or []
    prepare_jax(max([devices_of(name) for name in wanted], default=8), fast_compile=True)
    from spmd_distill.proof import run_verify

    if options.run_file is not None and options.config is not None:
        raise UserError("verify takes one run file, as an argument or with --config; found both.")
    path = options.run_file or options.config
    config = None if path is None else parse_config(path=path)
    return 0 if run_verify(wanted, options.mappers, options.dtype, config, as_json=options.json)["ok"] else 1
