"""What a run leaves behind: samples, the student as a Hugging Face folder, the summary."""

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_distill.build import Setup
from spmd_distill.compose import describe, describe_terms
from spmd_distill.errors import UserError
from spmd_distill.generation import generate
from spmd_distill.interop import ModelCard
from spmd_distill.metrics import perplexity, results_table
from spmd_distill.pretrained import save_pretrained
from spmd_distill.runfolder import RunFolder
from spmd_distill.types import Params

COMPARED = ("kl", "kl_reverse", "top1", "acceptance")
"""Agreement with the teacher, in the summary before and after; null where an objective compares no probabilities."""


def samples(setup: Setup, teacher: Params, student: Params) -> list[dict[str, str]]:
    """The run file's prompts, continued greedily by teacher and student."""
    tokenizer, wanted, run = setup.pair.tokenizer, setup.config.eval, setup.run
    rows = min(setup.pair.teacher.config.tokens, setup.pair.student.config.tokens)
    start = next((i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None), 0)
    prompts = [ids if len(ids := tokenizer.encode(p)) else [start] for p in wanted.prompts]
    found = [{"prompt": p} for p in wanted.prompts]
    if prompts:
        for who, model, params in (("teacher", run.teacher.model, teacher), ("student", run.student, student)):
            done = generate(
                model,
                params,
                run.mapper,
                prompts,
                max_new_tokens=wanted.new_tokens,
                compute_dtype=run.compute_dtype,
                vocab_size=min(run.objective.vocab_size or rows, tokenizer.vocab_size, rows),
            )
            for sample, ids in zip(found, done, strict=True):
                sample[who] = tokenizer.decode(ids)
    return found


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
            params,
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
    names, *figures = ([str(cell) for cell in column.cells] for column in results_table(before, after).columns)
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
        objective=describe(run.objective),
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
        "objective": describe_terms(setup.run.objective),
        "support": str(setup.run.objective.support),
        "vocab_size": setup.run.objective.vocab_size,
        "student_layers": list(setup.pair.layers),
        "teacher_parameters": setup.run.teacher.model.parameter_count,
        "student_parameters": setup.run.student.parameter_count,
        "teacher_ppl": perplexity(after["ce_teacher"]) if "ce_teacher" in after else None,
        "student_ppl_before": perplexity(before["ce_student"]),
        "student_ppl_after": perplexity(after["ce_student"]),
        **{f"{key}_{when}": m.get(key) for key in COMPARED for when, m in _when(before, after)},
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
