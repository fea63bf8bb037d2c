"""The student of a run: what it starts from, and how its teacher is made to speak of the same tokens."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spmd_distill.config import RunConfig
from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer, compare_tokenizers, rows_of
from spmd_distill.loading import Checkpoint, Say, open_checkpoint
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import Model, decoder
from spmd_distill.prune import Keep, cut, evenly
from spmd_distill.state import init_params, select_layers
from spmd_distill.types import Params


@dataclass(frozen=True, eq=False)
class Pair:
    """Teacher and student of a run, and where their parameters come from; none is loaded yet."""

    teacher: Model
    student: Model
    checkpoint: Checkpoint
    """The teacher on disk."""
    layers: tuple[int, ...] = ()
    """Which of the teacher's layers the student starts from; empty where it starts from none."""
    start: Checkpoint | None = None
    """The checkpoint that the student starts from, where it is not made of the teacher."""
    teacher_rows: np.ndarray | None = None
    """The teacher's tokens that the student's tokenizer knows too, by the student's ids; None where it knows all."""

    @property
    def origin(self) -> Checkpoint:
        """Whose tokenizer, config and files the student has."""
        return self.start or self.checkpoint

    @property
    def tokenizer(self) -> TextTokenizer:
        """What text is read with: the student's, whose tokens the teacher knows."""
        return self.origin.tokenizer

    @property
    def beginning(self) -> str:
        """What the student starts from, for people."""
        if self.start is not None:
            return f"{self.start.source}, {self.start.model.config.layers} layers"
        listed = ", ".join(map(str, self.layers))
        return f"its layers {listed}" if self.layers else f"{self.student.config.layers} random layers"

    def load_teacher(self, mapper: AbstractMapper) -> Params:
        """The teacher's parameters on their devices, for the student's vocabulary."""
        params = self.checkpoint.load(mapper)
        if self.teacher_rows is not None:
            params, _ = cut(params, self.checkpoint.model, Keep(tokens=self.teacher_rows), mapper)
        return params

    def start_student(self, teacher: Params, mapper: AbstractMapper, seed: int) -> Params:
        """The student's parameters before the first step, on their devices."""
        if self.start is not None:
            return self.start.load(mapper)
        if not self.layers:
            return init_params(self.student, mapper, seed)
        return select_layers(teacher, self.student, self.layers, mapper)


def build_pair(config: RunConfig, say: Say) -> Pair:
    """Open what the run file names. Raises `UserError` for what does not fit together."""
    types = config.precision
    checkpoint = open_checkpoint(config.teacher.path, types.teacher, say)
    teacher = decoder(replace(checkpoint.model.config, attention=config.teacher.attention))
    settings = {name: getattr(config.student, name) for name in ("dropout", "remat", "attention")}
    if config.student.init in ("teacher", "random"):
        layers = student_layers(config, teacher.config.layers)
        student = decoder(replace(teacher.config.of_layers(layers), param_dtype=types.student, **settings))
        return Pair(teacher, student, checkpoint, layers if config.student.init == "teacher" else ())
    start = open_checkpoint(config.student.init, types.student, say)
    rows = shared_tokens(start, checkpoint)
    if rows is not None:
        known = checkpoint.tokenizer.vocab_size
        say(f"the student's tokenizer knows {len(rows):,} of the teacher's {known:,} tokens")
        teacher = decoder(Keep(tokens=rows).sizes(teacher.config))
    return Pair(teacher, decoder(replace(start.model.config, **settings)), checkpoint, (), start, rows)


def student_layers(config: RunConfig, depth: int) -> tuple[int, ...]:
    """The teacher's layers that the student is made of: as listed, or spread evenly from the first to the last."""
    if config.student.layers is not None:
        layers = config.student.layers
        if not layers or any(not 0 <= i < depth for i in layers):
            raise UserError(f"student.layers is {list(layers)}; expected layers of the teacher, 0 to {depth - 1}.")
        return tuple(layers)
    if config.student.depth > depth:
        raise UserError(f"student.depth is {config.student.depth}, but the teacher has only {depth} layers.")
    return evenly(depth, config.student.depth)


def shared_tokens(student: Checkpoint, teacher: Checkpoint) -> Any:
    """The teacher's id of each of the student's tokens; None where the tokenizers are one.

    Raises `UserError` where the student knows a token that the teacher does not, saying how they differ.
    """
    rows = rows_of(student.tokenizer, teacher.tokenizer)
    if rows is None:
        difference = compare_tokenizers(teacher.tokenizer, student.tokenizer)
        raise UserError(
            f"The tokenizer of the student {student.source} is not that of the teacher {teacher.source}, and knows "
            f"tokens that the teacher does not:\n{difference.describe()}\nExpected the same one, or one with fewer of "
            f"its tokens."
        )
    return None if np.array_equal(rows, np.arange(teacher.tokenizer.vocab_size)) else rows
