"""Prompts continued while a run trains: ``samples.jsonl``, a JSON object a line with step, prompt, teacher, student."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmd_distill.build import Setup
from spmd_distill.distributed import is_first
from spmd_distill.errors import cannot_write
from spmd_distill.generation import generate
from spmd_distill.metrics import MetricWriter
from spmd_distill.types import Params

FILE = "samples.jsonl"


class Samples:
    """Continues the run file's prompts, greedily. The teacher does it once; programs are compiled once."""

    def __init__(self, setup: Setup, teacher: Params, folder: Path):
        self._setup, self._teacher, self._path = setup, teacher, folder / FILE
        self._said: list[str] | None = None
        self._latest: tuple[int, list[dict[str, str]]] | None = None

    def continued(self, student: Params) -> list[dict[str, str]]:
        """``prompt``, ``teacher`` and ``student`` of every prompt. All processes of a run call it together."""
        setup = self._setup
        prompts = setup.config.eval.prompts
        if not prompts:
            return []
        if self._said is None:
            self._said = self._of(setup.run.teacher.model, self._teacher)
        answers = self._of(setup.run.student, setup.run.trained.parted(student)[0])
        return [
            {"prompt": prompt, "teacher": theirs, "student": ours}
            for prompt, theirs, ours in zip(prompts, self._said, answers, strict=True)
        ]

    def cut_back(self, step: int) -> None:
        """Take away what a resumed run, restored at ``step``, is about to write again."""
        if is_first() and self._path.exists():
            lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
            kept = [line for line in lines if _step(line) <= step]
            draft = self._path.with_suffix(".tmp")
            draft.write_text("".join(f"{x}\n" for x in kept), encoding="utf-8")
            os.replace(draft, self._path)

    def at(self, step: int, student: Params) -> list[dict[str, str]]:
        """What `continued` says at the evaluation at ``step``, if the run file wants it there; else nothing."""
        wanted, last = self._setup.config.eval, step == self._setup.config.steps
        if not wanted.samples or (step % (wanted.every * wanted.samples_every) and not last):
            return []
        self._latest = step, self.continued(student)
        return self._latest[1]

    def at_end(self, step: int, student: Params) -> list[dict[str, str]]:
        """What `continued` says of the student of ``step``, which the evaluation there may have asked already."""
        if self._latest is not None and self._latest[0] == step:
            return self._latest[1]
        return self.continued(student)

    def write(self, step: int, found: Sequence[Mapping[str, str]], writer: MetricWriter) -> None:
        """Write what `at` returned, on process 0. Raises `UserError` where the file cannot be written."""
        if not found or not is_first():
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"step": step, **x}, ensure_ascii=False) + "\n" for x in found)
        except OSError as error:
            raise cannot_write(self._path, error) from error
        texts = [f"{x['prompt']}\n\nteacher: {x['teacher']}\n\nstudent: {x['student']}" for x in found]
        writer.text(step, {f"samples/{i}": text for i, text in enumerate(texts)})

    def _of(self, model: object, params: Params) -> list[str]:
        setup = self._setup
        tokenizer, wanted, run = setup.pair.tokenizer, setup.config.eval, setup.run
        rows = min(setup.pair.teacher.config.tokens, setup.pair.student.config.tokens)
        start = next((i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None), 0)
        prompts = [ids if len(ids := tokenizer.encode(p)) else [start] for p in wanted.prompts]
        done = generate(
            model,
            params,
            run.mapper,
            prompts,
            max_new_tokens=wanted.new_tokens,
            compute_dtype=run.compute_dtype,
            vocab_size=min(run.objective.vocab_size or rows, tokenizer.vocab_size, rows),
        )
        return [tokenizer.decode(ids) for ids in done]


def _step(line: str) -> float:
    """The step of a line; beyond all steps for what a kill cut short, or what is none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
