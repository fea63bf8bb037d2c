"""The proof: three optimizer steps under every layout and mapper, against one device and the reference head.

A small random teacher and student with odd head counts, an odd vocabulary, packed and padded rows, masks, dropout and
two micro-batches are trained from the same start. Loss, every gradient and every updated parameter must agree.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from spmd_distill.build import build_head, build_objective, set_up
from spmd_distill.config import RunConfig
from spmd_distill.errors import UserError
from spmd_distill.head import ReferenceHead
from spmd_distill.mappers import MAPPERS, make_mapper
from spmd_distill.models import DecoderConfig, Model, decoder
from spmd_distill.sharding import MeshLayout, layout_names
from spmd_distill.state import create_state
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch

BARS = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 5e-2}
"""The largest relative difference that passes, for loss, gradients and parameters; in bfloat16 for the loss alone."""

STEPS, MICRO_BATCHES, ROWS, LENGTH = 3, 2, 8, 16


def verify(
    layouts: Sequence[str] = (),
    mappers: Sequence[str] = tuple(MAPPERS),
    dtype: str = "float64",
    config: RunConfig | None = None,
    progress: Any = lambda combinations: combinations,
) -> dict[str, Any]:
    """Run the proof; return ``{"results": [...], "worst": {...}, "ok": bool}``.

    Each result has ``layout, mapper, head, dtype, loss, grad, param, ok``: the largest difference over all steps, each
    relative to the largest entry of the same array on one device. ``config`` takes models (with two layers each, and
    random weights), objective (inside the network: at these layers) and head from a run file; without ``layouts``, its
    own. Raises `UserError` for a layout
    or mapper that does not exist or does not fit.
    """
    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if bad := [m for m in mappers if m not in MAPPERS]:
        raise UserError(f"Unknown mapper {bad[0]!r}; expected one of {', '.join(MAPPERS)}.")
    chosen = list(layouts) or ([config.mesh] if config and config.mesh != "auto" else fitting_layouts())
    grids = [MeshLayout.load(name).resolve(len(jax.devices())) for name in chosen]
    case = _Case(dtype, config, max(ROWS, *(grid.batch_shards for grid in grids)))
    expected = case.trace(MeshLayout.load("single"), "vmap", reference=True)
    results = []
    for layout, mapper in progress([(layout, mapper) for layout in grids for mapper in mappers]):
        found = case.trace(layout, mapper, reference=False)
        worst = [max(x) for x in zip(*(_differences(a, b) for a, b in zip(found, expected, strict=True)), strict=True)]
        compared = worst[:1] if dtype == "bfloat16" else worst
        result = {"layout": layout.name, "mapper": mapper, "head": case.head.name, "dtype": dtype}
        result |= dict(zip(("loss", "grad", "param"), worst, strict=True))
        results.append(result | {"ok": all(x <= BARS[dtype] for x in compared)})  # NaN is not <=
    worst = {k: max((r[k] for r in results), key=lambda x: (math.isnan(x), x)) for k in ("loss", "grad", "param")}
    return {"results": results, "worst": worst, "ok": all(r["ok"] for r in results)}


def fitting_layouts() -> list[str]:
    """The built-in layouts that the devices found can run, one a distinct grid."""
    count = len(jax.devices())
    names = layout_names(count)
    fixed = [n for n in names if -1 not in MeshLayout.load(n).sizes.values()]
    return sorted(fixed, key=lambda n: (MeshLayout.load(n).device_count, n))


class _Case:
    """One pair of models, one start, one sequence of batches; traced on any layout."""

    def __init__(self, dtype: str, config: RunConfig | None, rows: int):
        self.dtype = dtype
        held = dtype if dtype != "bfloat16" else "float32"
        self.student, self.teacher, self.objective = _parts(config, held)
        self.head = build_head(config or replace(RunConfig(), head=replace(RunConfig().head, chunk=5)))
        tokens = min(self.student.config.tokens, self.teacher.config.tokens)
        self.batches = _batches(self.objective.vocab_size or tokens, rows)
        # A large eps: with a small one Adam turns rounding noise of tiny gradients into whole steps, on any layout.
        self.tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-4))
        init = lambda model, seed: jax.device_get(jax.jit(model.init)(jax.random.key(seed)))  # noqa: E731
        self.student_params, self.teacher_params = init(self.student, 0), init(self.teacher, 1)

    def trace(self, layout: MeshLayout, mapper_name: str, *, reference: bool) -> list[tuple[Any, Any, Any]]:
        """Loss, gradients and parameters (numpy) after each step."""
        mapper = make_mapper(mapper_name, layout)
        head = ReferenceHead() if reference else self.head
        teacher = OnlineTeacher(self.teacher)
        run = Distillation(self.student, teacher, self.objective, mapper, head, jnp.dtype(self.dtype))

        def place(params: Any, model: Model) -> Any:
            placed = jax.device_put(params, mapper.shardings(model.specs(mapper.layout)))
            return jax.tree.map(jnp.copy, placed)

        state = create_state(run, self.tx, place(self.student_params, self.student), seed=7)
        teacher_params = place(self.teacher_params, self.teacher)
        step = run.train_step(self.tx, return_gradients=True)
        shardings = mapper.shardings(run.batch_specs(1))
        seen = []
        for batch in self.batches:
            placed = jax.device_put(batch, shardings)
            state, metrics, grads = jax.block_until_ready(step(state, teacher_params, placed))
            seen.append(jax.device_get((metrics["loss"].value, grads, state.params)))
        return seen


def _parts(config: RunConfig | None, held: str) -> tuple[Model, Model, Any]:
    """Student, teacher and objective: small ones, or those of a run file with two layers each."""
    if config is None:
        sizes = {"vocab_size": 97, "layers": 2, "head_dim": 8, "param_dtype": held, "init_std": 0.3}
        student = DecoderConfig(width=24, heads=6, kv_heads=3, mlp=16, dropout=0.1, **sizes)
        teacher = DecoderConfig(width=32, heads=9, kv_heads=3, mlp=24, tied=False, **sizes)
        return decoder(student), decoder(teacher), build_objective(replace(RunConfig().objective, temperature=2.0))
    setup = set_up(replace(config, mesh="single", mapper="vmap"))
    student, teacher = setup.pair.student.config, setup.pair.teacher.config

    def cut(sizes: Any) -> Model:
        two = sizes.of_layers((0, sizes.layers - 1)) if sizes.layers > 1 else sizes
        return decoder(replace(two, param_dtype=held))

    student, teacher = cut(student), cut(teacher)
    return student, teacher, setup.objective_for(student.config.layers, teacher.config.layers)


def _batches(vocab_size: int, rows: int) -> list[Batch]:
    """A batch ``[A, B, L]`` a step: random tokens, two segments a row, padding, masks, rows without a label."""
    random, shape = np.random.default_rng(0), (MICRO_BATCHES, rows, LENGTH)
    batches = []
    for _ in range(STEPS):
        tokens = random.integers(0, vocab_size, (*shape[:2], LENGTH + 1)).astype(np.int32)
        cut, segments = 10, np.ones(shape, np.int32)
        segments[..., cut:] = 2
        segments[:, 1::3, 12:] = 0
        mask = (random.random(shape) < 0.7) & (segments > 0)
        mask[:, 0] = False
        positions = np.broadcast_to(np.r_[np.arange(cut), np.arange(LENGTH - cut)], shape).astype(np.int32)
        batches.append(Batch(tokens[..., :-1], tokens[..., 1:], mask, positions, segments))
    return batches


def _differences(found: tuple[Any, Any, Any], expected: tuple[Any, Any, Any]) -> tuple[float, ...]:
    def relative(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float64).tiny))

    def worst(a: Any, b: Any) -> float:
        values = jax.tree.leaves(jax.tree.map(relative, a, b))
        return math.nan if any(map(math.isnan, values)) else max(values)

    return tuple(worst(a, b) for a, b in zip(found, expected, strict=True))


def run_verify(
    layouts: Sequence[str], mappers: Sequence[str], dtype: str, config: RunConfig | None, *, as_json: bool
) -> dict[str, Any]:
    """`verify` for people: a table (or with ``as_json`` one JSON object) on stdout, progress on stderr."""
    console = Console(stderr=True)
    report = verify(
        layouts,
        mappers,
        dtype,
        config,
        lambda combinations: track(combinations, "proving", console=console, transient=True),
    )
    if as_json:
        print(json.dumps(report))
        return report
    table = Table(title=f"Largest relative difference from one device with the reference head ({dtype}, {STEPS} steps)")
    for name in ("layout", "mapper", "head"):
        table.add_column(name)
    for name in ("loss", "gradients", "parameters", ""):
        table.add_column(name, justify="right")
    for r in report["results"]:
        verdict = "[green]ok[/green]" if r["ok"] else "[red]DIFFERS[/red]"
        figures = [f"{r[k]:.1e}" for k in ("loss", "grad", "param")]
        table.add_row(r["layout"], r["mapper"], r["head"], *figures, verdict)
    out = Console(file=sys.stdout)
    out.print(table)
    worst = ", ".join(f"{name} {value:.1e}" for name, value in report["worst"].items())
    what = "the loss is held to" if dtype == "bfloat16" else "all are held to"
    verdict = "All agree." if report["ok"] else "They do NOT agree."
    out.print(f"Worst: {worst}; {what} {BARS[dtype]:.0e}. {verdict}", soft_wrap=True)
    return report
