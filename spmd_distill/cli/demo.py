"""``spmd-distill demo``: SmolLM2-135M into a smaller student, on this machine."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spmd_distill.cli.common import MAPPER_NAMES, run
from spmd_distill.config import RunConfig, parse_config
from spmd_distill.runtime import devices_of, run_files_folder


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = commands.add_parser("demo", help="distil SmolLM2-135M into a smaller student on this machine")
    parser.add_argument("--run", metavar="DIR", default="runs/demo", help="the run folder (default %(default)s)")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps")
    parser.add_argument("--mesh", default="auto", help="a layout by name or path (default: auto)")
    parser.add_argument("--mapper", choices=MAPPER_NAMES, default="shard_map")
    parser.add_argument("--teacher", metavar="FILE", default="demo", help="a GGUF file or Hugging Face folder")
    parser.add_argument("--text", metavar="PATH", nargs="+", default=["demo"], help="text files or folders of them")
    parser.set_defaults(act=act)


def act(options: argparse.Namespace, _: list[str]) -> int:
    """Run the demo."""
    return run(settings(options), resume=False)


def settings(options: argparse.Namespace, rest: Sequence[str] = ()) -> RunConfig:
    """The settings of the run."""
    return demo_config(options.run, options.mesh, options.mapper, options.teacher, tuple(options.text), options.steps)


def demo_config(
    run: str,
    mesh: str = "auto",
    mapper: str = "shard_map",
    teacher: str = "demo",
    text: tuple[str, ...] = ("demo",),
    steps: int | None = None,
) -> RunConfig:
    """The demo's settings: what ``spmd-distill demo`` runs, and a start for one's own."""
    given = ["--run", run, "--mesh", mesh, "--mapper", mapper, "--teacher.path", teacher]
    base = parse_config(given, run_files_folder() / "cpu.yaml")
    return replace(
        base,
        steps=base.steps if steps is None else steps,
        student=base.student if teacher == "demo" else replace(base.student, layers=None),
        data=replace(base.data, train=text, rows=max(base.data.rows, _batch_shards(mesh))),
    )


def _batch_shards(mesh: str) -> int:
    """Into how many pieces a layout cuts a batch, so that the demo's is large enough."""
    from spmd_distill.sharding import MeshLayout

    if mesh == "auto":
        return 1
    layout = MeshLayout.load(mesh)
    return layout.resolve(max(devices_of(mesh), layout.device_count)).batch_shards
