"""What a run leaves behind: what it compiled, the student as a Hugging Face folder, the summary."""

import dataclasses
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spmd_distill.build import Setup
from spmd_distill.compose import describe, describe_terms
from spmd_distill.errors import UserError
from spmd_distill.head import FusedHead
from spmd_distill.interop import ModelCard
from spmd_distill.metrics import Work, perplexity, results_table
from spmd_distill.models import Model
from spmd_distill.pretrained import save_pretrained
from spmd_distill.program import Compiled, analytic_flops, published_peak, step_flops
from spmd_distill.runfolder import RunFolder
from spmd_distill.types import Batch, Params

COMPARED = ("kl", "kl_reverse", "top1", "acceptance")
"""Agreement with the teacher, in the summary before and after; null where an objective compares no probabilities."""


def work_of(setup: Setup, batch: Batch) -> Work:
    """What a step on a batch like ``batch [A, B, L]`` asks for, and the most that the devices could do."""
    run, given = setup.run, setup.config.logging.peak_tflops
    try:
        flops = step_flops(run, batch)
    except UserError:  # a model of another code base that cannot be traced without its mesh
        flops = None
    devices = run.mapper.devices
    one = published_peak(devices[0].device_kind, jnp.dtype(run.compute_dtype).name) if given is None else given * 1e12
    return Work(flops, None if one is None else one * len(devices))


def compiled_facts(setup: Setup, step: Compiled, work: Work) -> dict[str, Any]:
    """What ``compiled.json`` holds: the program that trains, as it was really made."""
    run, config, layout = setup.run, setup.config, setup.run.mapper.layout
    rows = config.data.rows * config.data.micro_batches
    student, teacher = run.student, run.teacher.model
    formula = None
    if isinstance(student, Model) and isinstance(teacher, Model):
        formula = analytic_flops(student.config, teacher.config, rows, config.data.length)
    memory = step.memory
    return {
        "objective": describe(run.objective, run.inside),
        "support": str(run.objective.support),
        "vocab_size": run.objective.vocab_size,
        "head": {"kind": run.head.name, "chunk": _chunk(setup)},
        "mapper": run.mapper.name,
        "layout": {"name": layout.name, "axes": dict(layout.sizes), "rules": dict(layout.rules)},
        "devices": len(run.mapper.devices),
        "dtypes": {
            "compute": jnp.dtype(run.compute_dtype).name,
            "student": _types(run.student.abstract),
            "teacher": _types(run.teacher.model.abstract),
            "optimizer": _types(run.abstract_state(setup.tx).opt_state),
        },
        "batch": {"micro_batches": config.data.micro_batches, "rows": config.data.rows, "length": config.data.length},
        "flops_per_step": {
            "counted": work.flops,
            "formula": formula,
            "xla_per_device_loops_once": step.cost.get("flops"),
        },
        "peak_flops_per_second": work.peak,
        "bytes_per_device": None if memory is None else {**dataclasses.asdict(memory), "total": memory.total},
        "compile_seconds": step.seconds,
    }


def _types(tree: Any) -> list[str]:
    return sorted({jnp.dtype(x.dtype).name for x in jax.tree.leaves(tree)})


def _chunk(setup: Setup) -> int | None:
    """Tokens that a device's head looks at at once; None for a head that looks at all."""
    run, data, layout = setup.run, setup.config.data, setup.run.mapper.layout
    student, teacher = (m.config if isinstance(m, Model) else None for m in (run.student, run.teacher.model))
    if not isinstance(run.head, FusedHead) or student is None or teacher is None:
        return None
    gathered = math.prod(layout.sizes[axis] for axis in layout.shared_axes)
    shards = math.prod(layout.sizes[axis] for axis in layout.vocab_axes)
    tokens = data.rows // layout.batch_shards * data.length * gathered
    vocab = max(student.padded_vocab, teacher.padded_vocab) // shards
    itemsize = max(jnp.dtype(run.compute_dtype).itemsize, 4)
    return run.head.chunk_size(tokens, vocab, student.width, itemsize)


def export_student(
    setup: Setup, params: Params, folder: RunFolder, before: Mapping[str, float], after: Mapping[str, float]
) -> None:
    """Write ``student/``: config, weights, tokenizer and card, as transformers loads them.

    Raises `UserError` where it cannot be written; the run's checkpoints hold it.
    """
    try:
        save_pretrained(
            folder.student,
            setup.pair.student,
            setup.run.trained.parted(params)[0],
            like=setup.pair.origin,
            card=describe_run(setup, folder.path.name, before, after),
            overwrite=True,
        )
    except OSError as error:
        raise UserError(
            f"The student cannot be exported: {error}. It is safe in the checkpoints of {folder.path}: make room, and "
            f"go on with spmd-distill train --resume {folder.path}"
        ) from error


def describe_run(setup: Setup, title: str, before: Mapping[str, float], after: Mapping[str, float]) -> ModelCard:
    """The card of a run's student. Files are named without their folders: a card is published."""
    config, run, source = setup.config, setup.run, setup.pair.checkpoint.source
    teacher, student, start = setup.pair.teacher, setup.pair.student, setup.pair.start
    table = results_table(before, after, run.objective.features)
    names, *figures = ([str(cell) for cell in column.cells] for column in table.columns)
    return ModelCard(
        title=title,
        teacher={
            "model": source.repository or source.path.name,
            "layers": teacher.config.layers,
            "parameters": f"{teacher.parameter_count:,}",
        },
        student={
            "started from": setup.pair.beginning(None if start is None else start.source.path.name),
            "parameters": f"{student.parameter_count:,}",
            "type": student.config.param_dtype,
        },
        data={
            "training text": [Path(source.path).name for source in config.data.sources],
            "tokens of a row": config.data.length,
            "rows of a step": config.data.rows * config.data.micro_batches,
            "steps": config.steps,
        },
        objective=describe(run.objective, run.inside),
        results={
            name: dict(zip(("before", "after"), row, strict=True)) for name, *row in zip(names, *figures, strict=True)
        },
    )


def summarise(
    setup: Setup, before: Mapping[str, float], after: Mapping[str, float], steps: int, tokens: int, seconds: float,
    tokens_per_second: float,
) -> dict[str, Any]:  # fmt: skip
    """The figures of a run, as written to ``summary.json``. ``seconds`` is the whole command's time."""
    return {
        "mesh": setup.run.mapper.layout.name,
        "mapper": setup.run.mapper.name,
        "head": setup.config.head.kind,
        "objective": describe_terms(setup.run.objective, setup.run.inside),
        "support": str(setup.run.objective.support),
        "vocab_size": setup.run.objective.vocab_size,
        "student_layers": list(setup.pair.layers),
        "teacher_parameters": setup.run.teacher.model.parameter_count,
        "student_parameters": setup.run.student.parameter_count,
        "teacher_ppl": perplexity(after["ce_teacher"]) if "ce_teacher" in after else None,
        "student_ppl_before": perplexity(before["ce_student"]),
        "student_ppl_after": perplexity(after["ce_student"]),
        **{
            f"{key}_{when}": m.get(key)
            for key in (*COMPARED, *setup.run.objective.features)
            for when, m in _when(before, after)
        },
        "steps": steps,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens_per_second,
        "peak_rss_gib": peak_rss_gib(),
    }


def _when(before: Mapping[str, float], after: Mapping[str, float]) -> Sequence[tuple[str, Mapping[str, float]]]:
    return ("before", before), ("after", after)


def peak_rss_gib() -> float:
    """The most memory this process has held, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
