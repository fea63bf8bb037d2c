"""``spmd-distill prune``: a smaller model made of parts of a larger one."""

import argparse
from typing import Any, get_args

from spmd_distill.config import Order
from spmd_distill.errors import UserError
from spmd_distill.runtime import devices_of, prepare_jax


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser("prune", help="write a smaller model made of parts of a larger one")
    parser.add_argument("teacher", metavar="TEACHER", help="a Hugging Face folder, a GGUF file, or demo")
    parser.add_argument("out", metavar="OUT", help="the folder to write: new or empty")
    parser.add_argument("--depth", type=int, metavar="N", help="layers to keep")
    parser.add_argument("--layers", metavar="0,3,..", help="the layers to keep, from 0")
    parser.add_argument("--order", choices=get_args(Order), default="importance", help="how --depth chooses")
    parser.add_argument("--mlp", "--ffn", type=int, metavar="N", help="neurons of each MLP to keep")
    parser.add_argument("--heads", type=int, metavar="N", help="query heads to keep, in whole groups")
    parser.add_argument("--kv-heads", type=int, metavar="N", help="key/value heads to keep, with their query heads")
    parser.add_argument("--width", type=int, metavar="N", help="channels of the hidden state to keep")
    parser.add_argument("--vocab-from", metavar="PATH", nargs="+", default=[], help="keep the tokens of these texts")
    parser.add_argument("--text", metavar="PATH", nargs="+", default=["demo"], help="to measure importance and cost on")
    parser.add_argument("--calibration-rows", type=int, default=8, metavar="N", help="of --text (default %(default)s)")
    parser.add_argument("--heldout-rows", type=int, default=16, metavar="N", help="of --text (default %(default)s)")
    parser.add_argument("--length", type=int, default=128, metavar="N", help="tokens a row (default %(default)s)")
    parser.add_argument("--mesh", default="single", help="a layout by name or path, or auto (default %(default)s)")
    parser.set_defaults(act=act)


def act(options: argparse.Namespace, _: list[str]) -> int:
    """Prune."""
    layers = None
    if options.layers is not None:
        try:
            layers = tuple(int(x) for x in options.layers.split(","))
        except ValueError:
            raise UserError(f"--layers is {options.layers!r}; expected numbers with commas between, 0,3,7.") from None
    prepare_jax(devices_of(options.mesh))
    from spmd_distill.build import build_mapper
    from spmd_distill.prune.command import Wanted, prune

    sizes = {name: getattr(options, name) for name in ("depth", "order", "mlp", "heads", "kv_heads", "width")}
    rows = {name: getattr(options, name) for name in ("calibration_rows", "heldout_rows", "length")}
    wanted = Wanted(layers, vocab_from=tuple(options.vocab_from), **sizes, **rows)
    prune(options.teacher, options.out, wanted, options.text, build_mapper(options.mesh, "shard_map"))
    return 0
