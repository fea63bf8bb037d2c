"""The student of a run: what it starts from, and how its teacher is made to speak of the same tokens."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spmd_distill.config import RunConfig
from spmd_distill.distributed import from_first
from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer, compare_tokenizers, rows_of
from spmd_distill.loading import Checkpoint, Say, open_checkpoint
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import Model, decoder
from spmd_distill.prune import Keep, cut, evenly
from spmd_distill.prune.command import Wanted, describe, prune, read_report
from spmd_distill.state import init_params, select_layers
from spmd_distill.types import Params

DEPTH = 11
"""Layers of the teacher that a student has where nothing is said."""


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
    student_rows: np.ndarray | None = None
    """The rows of the student's tables that are tokens, where these have another number of rows than the teacher's."""

    @property
    def origin(self) -> Checkpoint:
        """Whose tokenizer, config and files the student has."""
        return self.start or self.checkpoint

    @property
    def tokenizer(self) -> TextTokenizer:
        """What text is read with: the student's, whose tokens the teacher knows."""
        return self.origin.tokenizer

    def beginning(self, name: str | None = None) -> str:
        """What the student starts from, for people; a checkpoint is called ``name``, or as it was asked for."""
        if self.start is not None:
            pruned = read_report(self.start.source.path)
            parts = "" if pruned is None else f", pruned to {describe(pruned)}"
            return f"{name or self.start.source}, {self.start.model.config.layers} layers{parts}"
        if self.layers:
            return f"the teacher's layers {', '.join(map(str, self.layers))}"
        return f"{self.student.config.layers} random layers"

    def load_teacher(self, mapper: AbstractMapper) -> Params:
        """The teacher's parameters on their devices, for the student's vocabulary."""
        params = self.checkpoint.load(mapper)
        if self.teacher_rows is not None:
            params, _ = cut(params, self.checkpoint.model, Keep(tokens=self.teacher_rows), mapper)
        return params

    def start_student(self, teacher: Params, mapper: AbstractMapper, seed: int) -> Params:
        """The student's parameters before the first step, on their devices."""
        if self.start is not None:
            params = self.start.load(mapper)
            if self.student_rows is not None:
                params, _ = cut(params, self.start.model, Keep(tokens=self.student_rows), mapper)
            return params
        if not self.layers:
            return init_params(self.student, mapper, seed)
        return select_layers(teacher, self.student, self.layers, mapper)


def build_pair(config: RunConfig, say: Say, start: Path | None = None) -> Pair:
    """Open what the run file names. Raises `UserError` for what does not fit together.

    ``start`` is what `prune_start` wrote. Without it, a student that has to be pruned has its sizes and random
    parameters.
    """
    wanted, types = config.student, config.precision
    checkpoint = open_checkpoint(config.teacher.path, types.teacher, say)
    teacher = decoder(replace(checkpoint.model.config, attention=config.teacher.attention))
    settings = {name: getattr(wanted, name) for name in ("dropout", "remat", "attention")}
    settings["param_dtype"] = types.student
    if wanted.init in ("teacher", "random") and not wanted.pruned:
        layers = student_layers(config, teacher.config.layers)
        student = decoder(replace(teacher.config.of_layers(layers), **settings))
        return Pair(teacher, student, checkpoint, layers if wanted.init == "teacher" else ())
    if wanted.pruned and start is None:
        from_teacher = wanted.init in ("teacher", "random")
        source = checkpoint if from_teacher else open_checkpoint(wanted.init, types.student, say)
        sizes = wanted_of(config).first(source.model.config).sizes(source.model.config)
        return Pair(teacher, decoder(replace(sizes, **settings)), checkpoint)
    found = open_checkpoint(start or wanted.init, types.student, say)
    rows, own, sizes = shared_tokens(found, checkpoint), None, found.model.config
    if rows is not None:
        known = checkpoint.tokenizer.vocab_size
        say(f"the student's tokenizer knows {len(rows):,} of the teacher's {known:,} tokens")
    elif sizes.padded_vocab != teacher.config.padded_vocab:
        rows = np.arange(found.tokenizer.vocab_size)
    if rows is not None:
        teacher = decoder(Keep(tokens=rows).sizes(teacher.config))
        if sizes.padded_vocab != teacher.config.padded_vocab:
            own = np.arange(len(rows))
            sizes = Keep(tokens=own).sizes(sizes)
    return Pair(teacher, decoder(replace(sizes, **settings)), checkpoint, (), found, rows, own)


def wanted_of(config: RunConfig) -> Wanted:
    """What the run file wants of the model that its student is made of."""
    names = ("layers", "depth", "order", "mlp", "heads", "kv_heads", "width", "vocab_from", "calibration_rows")
    given = {name: getattr(config.student, name) for name in names}
    if given["layers"] is not None:
        given["depth"] = None
    return Wanted(**given, heldout_rows=config.eval.rows, length=config.data.length)


def prune_start(
    config: RunConfig,
    folder: Path,
    mapper: AbstractMapper,
    stage: Callable[[str], AbstractContextManager[None]],
    say: Say,
) -> Path | None:
    """Make the student of a run whose student has to be pruned, in ``folder``, unless it is there; return it.

    None where there is nothing to prune, or nothing to rank because the student's parameters are random.
    """
    wanted = config.student
    if not wanted.pruned or wanted.init == "random":
        return None
    if from_first(str((folder / "config.json").exists())) == "False":
        source = config.teacher.path if wanted.init == "teacher" else wanted.init
        train, heldout = ([s.path for s in of] for of in (config.data.sources, config.data.heldout_sources))
        dtype = config.precision.student
        if source != config.teacher.path:
            shared_tokens(open_checkpoint(source, dtype, say), open_checkpoint(config.teacher.path, dtype, say))
        report = prune(
            source, folder, wanted_of(config), train, mapper, heldout=heldout, param_dtype=dtype, stage=stage
        )
        say(f"pruned to {describe(report)}")
    return folder


def student_layers(config: RunConfig, depth: int) -> tuple[int, ...]:
    """The teacher's layers that the student is made of: as listed, or spread evenly from the first to the last."""
    if config.student.layers is not None:
        layers = config.student.layers
        if not layers or any(not 0 <= i < depth for i in layers):
            raise UserError(f"student.layers is {list(layers)}; expected layers of the teacher, 0 to {depth - 1}.")
        return tuple(layers)
    count = config.student.depth or DEPTH
    if count > depth:
        raise UserError(f"student.depth is {count}, but the teacher has only {depth} layers.")
    return evenly(depth, count)


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
