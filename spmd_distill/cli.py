"""The command ``spmd-distill``. It reads its arguments and prepares the environment before it imports jax."""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from spmd_distill.config import Order, RunConfig, parse_config
from spmd_distill.errors import UserError
from spmd_distill.runtime import devices_of, prepare_jax

MAPPER_NAMES = ("shard_map", "vmap", "pmap")
DEMO_LAYERS = (0, 1, 2, 6, 8, 9, 10, 11, 24, 27, 28, 29)
"""Those whose removal costs most: ``spmd-distill prune demo OUT --depth 12``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 a proof failed, 2 a mistake of the user's, 130 interrupted."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "train":
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax prints tracebacks of what we report in a sentence
    try:
        return options.act(options, rest)
    except UserError as error:
        print(f"spmd-distill: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\nspmd-distill: {stop or 'interrupted'}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spmd-distill",
        description="Distil a large language model into a small one, sharded, and prove it.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="distil SmolLM2-135M into a smaller student on this machine")
    demo.add_argument("--run", metavar="DIR", default="runs/demo", help="the run folder (default %(default)s)")
    demo.add_argument("--steps", type=int, default=None, help="optimizer steps")
    demo.add_argument("--mesh", default="auto", help="a layout by name or path (default: auto)")
    demo.add_argument("--mapper", choices=MAPPER_NAMES, default="shard_map")
    demo.add_argument("--teacher", metavar="FILE", default="demo", help="a GGUF file or Hugging Face folder")
    demo.add_argument("--text", metavar="PATH", nargs="+", default=["demo"], help="text files or folders of them")
    demo.set_defaults(act=_demo)

    train = commands.add_parser(
        "train", help="run a run file", epilog="Any setting can be given as a flag: --optimizer.learning_rate 1e-4"
    )
    train.add_argument("config", nargs="?", metavar="RUN.yaml", help="the run file")
    train.add_argument("--resume", metavar="DIR", help="go on with the run in this folder")
    train.set_defaults(act=_train)

    prune = commands.add_parser("prune", help="write a smaller model made of parts of a larger one")
    prune.add_argument("teacher", metavar="TEACHER", help="a Hugging Face folder, a GGUF file, or demo")
    prune.add_argument("out", metavar="OUT", help="the folder to write: new or empty")
    prune.add_argument("--depth", type=int, metavar="N", help="layers to keep")
    prune.add_argument("--layers", metavar="0,3,..", help="the layers to keep, from 0")
    prune.add_argument("--order", choices=get_args(Order), default="importance", help="how --depth chooses")
    prune.add_argument("--mlp", "--ffn", type=int, metavar="N", help="neurons of each MLP to keep")
    prune.add_argument("--heads", type=int, metavar="N", help="query heads to keep, in whole groups")
    prune.add_argument("--kv-heads", type=int, metavar="N", help="key/value heads to keep, with their query heads")
    prune.add_argument("--width", type=int, metavar="N", help="channels of the hidden state to keep")
    prune.add_argument("--vocab-from", metavar="PATH", nargs="+", default=[], help="keep the tokens of these texts")
    prune.add_argument("--text", metavar="PATH", nargs="+", default=["demo"], help="to measure importance and cost on")
    prune.add_argument("--calibration-rows", type=int, default=8, metavar="N", help="of --text (default %(default)s)")
    prune.add_argument("--heldout-rows", type=int, default=16, metavar="N", help="of --text (default %(default)s)")
    prune.add_argument("--length", type=int, default=128, metavar="N", help="tokens a row (default %(default)s)")
    prune.add_argument("--mesh", default="single", help="a layout by name or path, or auto (default %(default)s)")
    prune.set_defaults(act=_prune)

    verify = commands.add_parser("verify", help="prove that no layout and no mapper changes the result")
    verify.add_argument("run_file", nargs="?", metavar="RUN.yaml", help="prove the models and settings of a run file")
    verify.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    verify.add_argument("--layouts", metavar="NAME", nargs="+", default=None, help="default: all that fit 8 devices")
    verify.add_argument("--mappers", metavar="NAME", nargs="+", default=list(MAPPER_NAMES))
    verify.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float64")
    verify.add_argument("--config", metavar="RUN.yaml", help="the same as RUN.yaml")
    verify.set_defaults(act=_verify)
    return parser


def _demo(options: argparse.Namespace, _: list[str]) -> int:
    config = demo_config(options.run, options.mesh, options.mapper, options.teacher, tuple(options.text), options.steps)
    return _distil(config, resume=False)


def demo_config(
    run: str,
    mesh: str = "auto",
    mapper: str = "shard_map",
    teacher: str = "demo",
    text: tuple[str, ...] = ("demo",),
    steps: int | None = None,
) -> RunConfig:
    """The demo's settings: what ``spmd-distill demo`` runs, and a start for one's own."""
    base = parse_config(["--run", run, "--mesh", mesh, "--mapper", mapper, "--teacher.path", teacher])
    steps = 40 if steps is None else steps
    own = teacher == "demo"
    return replace(
        base,
        steps=steps,
        student=replace(base.student, layers=DEMO_LAYERS if own else None),
        data=replace(base.data, train=text, rows=max(4, _batch_shards(mesh)), max_train_tokens=200_000),
        eval=replace(base.eval, every=20, rows=16, new_tokens=12),
    )


def _batch_shards(mesh: str) -> int:
    """Into how many pieces a layout cuts a batch, so that the demo's is large enough."""
    from spmd_distill.sharding import MeshLayout

    if mesh == "auto":
        return 1
    layout = MeshLayout.load(mesh)
    return layout.resolve(max(devices_of(mesh), layout.device_count)).batch_shards


def _train(options: argparse.Namespace, rest: list[str]) -> int:
    if (options.config is None) == (options.resume is None):
        raise UserError("train takes a run file, or --resume DIR to go on with a run; found both or neither.")
    path = options.config if options.resume is None else Path(options.resume) / "config.yaml"
    if options.resume is not None and not path.is_file():
        raise UserError(f"There is no run to go on with in {options.resume}: it has no config.yaml.")
    config = parse_config(rest, path)
    if options.resume is not None:
        config = replace(config, run=str(options.resume))
    return _distil(config, resume=options.resume is not None)


def _distil(config: RunConfig, resume: bool) -> int:
    prepare_jax(devices_of(config.mesh))
    from spmd_distill.train import distil

    distil(config, resume=resume)
    return 0


def _prune(options: argparse.Namespace, _: list[str]) -> int:
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


def _verify(options: argparse.Namespace, _: list[str]) -> int:
    wanted = options.layouts or []
    prepare_jax(max([devices_of(name) for name in wanted], default=8), fast_compile=True)
    from spmd_distill.proof import run_verify

    if options.run_file is not None and options.config is not None:
        raise UserError("verify takes one run file, as an argument or with --config; found both.")
    path = options.run_file or options.config
    config = None if path is None else parse_config(path=path)
    return 0 if run_verify(wanted, options.mappers, options.dtype, config, as_json=options.json)["ok"] else 1
