"""From a run file to the parts of a run: mapper, teacher, student, objective, optimizer."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd_distill.compose import build_objective, describe, describe_vocabulary, moving_numbers, shared_vocabulary
from spmd_distill.config import OptimizerConfig, RunConfig
from spmd_distill.data import Rows
from spmd_distill.errors import UserError
from spmd_distill.head import AbstractHead, FusedHead, ReferenceHead
from spmd_distill.interop import TextTokenizer, compare_tokenizers, rows_of
from spmd_distill.loading import Checkpoint, Say, documents, open_checkpoint, tokenise
from spmd_distill.mappers import AbstractMapper, make_mapper
from spmd_distill.models import Model, decoder
from spmd_distill.prune import Keep, cut, evenly
from spmd_distill.state import init_params, select_layers
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Params


@dataclass(frozen=True)
class Setup:
    """The parts of a run, built but holding no array yet."""

    config: RunConfig
    checkpoint: Checkpoint
    """The teacher on disk."""
    layers: tuple[int, ...]
    """Which of the teacher's layers the student starts from; empty where it starts from none."""
    run: Distillation
    tx: optax.GradientTransformation
    schedule: optax.Schedule
    """Learning rate by optimizer step."""
    start: Checkpoint | None = None
    """The checkpoint that the student starts from, where it is not made of the teacher."""
    teacher_rows: np.ndarray | None = None
    """The teacher's tokens that the student's tokenizer knows too, by the student's ids; None where it knows all."""

    @property
    def student(self) -> Model:
        """The student, a decoder of ours."""
        assert isinstance(self.run.student, Model)
        return self.run.student

    @property
    def teacher(self) -> Model:
        """The teacher, a decoder of ours."""
        assert isinstance(self.run.teacher.model, Model)
        return self.run.teacher.model

    @property
    def origin(self) -> Checkpoint:
        """Whose tokenizer, config and files the student has."""
        return self.start or self.checkpoint

    @property
    def tokenizer(self) -> TextTokenizer:
        """What text is read with: the student's, whose tokens the teacher knows."""
        return self.origin.tokenizer

    def load_teacher(self) -> Params:
        """The teacher's parameters on their devices, for the student's vocabulary."""
        params, mapper = self.checkpoint.load(self.run.mapper), self.run.mapper
        if self.teacher_rows is not None:
            params, _ = cut(params, self.checkpoint.model, Keep(tokens=self.teacher_rows), mapper)
        return params

    def start_student(self, teacher: Params) -> Params:
        """The student's parameters before the first step, on their devices."""
        mapper = self.run.mapper
        if self.start is not None:
            return self.start.load(mapper)
        if self.config.student.init == "random":
            return init_params(self.student, mapper, self.config.seed)
        return select_layers(teacher, self.student, self.layers, mapper)

    def scheduled(self, step: int) -> dict[str, float]:
        """The learning rate, and whatever else moves, as used in the optimizer step after ``step`` of them."""
        return {"learning_rate": float(np.asarray(self.schedule(step))), **moving_numbers(self.run.objective, step)}

    @property
    def beginning(self) -> str:
        """What the student starts from, for people."""
        if self.start is not None:
            return f"{self.start.source}, {self.start.model.config.layers} layers"
        listed = ", ".join(map(str, self.layers))
        return f"its layers {listed}" if self.layers else f"{self.student.config.layers} random layers"

    def introduction(self, tokens: int) -> str:
        """What is about to run, as it was really put together, for people."""
        run, objective = self.run, self.run.objective
        teacher, student, layout = self.teacher, self.student, run.mapper.layout
        grid = " x ".join(f"{axis} {n}" for axis, n in layout.sizes.items())
        sizes = self.tokenizer.vocab_size, teacher.config.tokens, student.config.tokens
        return (
            f"teacher: {teacher.config.layers} layers, {teacher.parameter_count / 1e6:.0f}M parameters; student: "
            f"{self.beginning}, {student.parameter_count / 1e6:.0f}M parameters\n"
            f"mesh {layout.name} ({grid}) on {len(run.mapper.devices)} {run.mapper.devices[0].platform} device(s), "
            f"mapper {run.mapper.name}, head {run.head.name}; {tokens:,} tokens to train on\n"
            f"objective: {describe(objective)}\n{describe_vocabulary(objective, *sizes)}"
        )


def set_up(config: RunConfig, say: Say = lambda message: None) -> Setup:
    """Open the teacher and put the run together. Raises `UserError` for everything that does not fit."""
    types = config.precision
    if "float64" in (types.compute, types.teacher, types.student):
        jax.config.update("jax_enable_x64", True)
    mapper = build_mapper(config.mesh, config.mapper)
    check_batch(config, mapper)
    checkpoint = open_checkpoint(config.teacher.path, types.teacher, say)
    start, rows, teacher = None, None, checkpoint.model
    if config.student.init in ("teacher", "random"):
        layers = student_layers(config, teacher.config.layers)
        sizes = replace(teacher.config.of_layers(layers), param_dtype=types.student)
        layers = layers if config.student.init == "teacher" else ()
    else:
        start = open_checkpoint(config.student.init, types.student, say)
        layers, sizes = (), start.model.config
        rows = shared_tokens(start, checkpoint)
    if rows is not None:
        say(f"the student's tokenizer knows {len(rows):,} of the teacher's {checkpoint.tokenizer.vocab_size:,} tokens")
        teacher = decoder(Keep(tokens=rows).sizes(teacher.config))
    student = decoder(replace(sizes, dropout=config.student.dropout, remat=config.student.remat))
    for model in (teacher, student):
        model.specs(mapper.layout)  # says now what does not fit
    counts = (start or checkpoint).tokenizer.vocab_size, teacher.config.tokens, student.config.tokens
    vocabulary = shared_vocabulary(config.objective.vocab_size, *counts)
    run = Distillation(
        student,
        OnlineTeacher(teacher),
        build_objective(config.objective, vocabulary, say),
        mapper,
        build_head(config),
        jnp.dtype(types.compute),
    )
    schedule = build_schedule(config.optimizer, config.steps)
    tx = build_optimizer(config.optimizer, schedule)
    return Setup(config, checkpoint, layers, run, tx, schedule, start, rows)


def load_text(setup: Setup) -> tuple[Rows, Rows]:
    """Training rows and held-out rows, tokenised and checked against the vocabulary."""
    config, tokenizer = setup.config, setup.tokenizer
    training, aside = documents(config.data.train, config.data.heldout)
    vocab = setup.run.objective.vocab_size or setup.student.config.tokens
    length, limit = config.data.length, config.data.max_train_tokens
    train = tokenise(training, tokenizer, length, vocab, limit, "training")
    return train, tokenise(aside, tokenizer, length, vocab, 2 * config.eval.rows * length, "held-out")


def build_mapper(mesh: str, mapper: str) -> AbstractMapper:
    """The mapper over the layout called ``mesh``; ``auto`` takes what the devices found allow."""
    if mesh == "auto":
        count = len(jax.devices())
        mesh = "single" if count == 1 else "dp2_tp4" if count == 8 else "fsdp"
    return make_mapper(mapper, mesh)


def check_batch(config: RunConfig, mapper: AbstractMapper) -> None:
    """Raise `UserError` where the batch cannot be cut as the layout says."""
    layout, data = mapper.layout, config.data
    if data.rows % layout.batch_shards:
        fitting = math.ceil(data.rows / layout.batch_shards) * layout.batch_shards
        raise UserError(
            f"data.rows is {data.rows}, which mesh layout {layout.name!r} cannot spread over {layout.batch_shards} "
            f"batch shards evenly. Take {fitting} rows, or another layout."
        )
    if layout.sequence_sharded and data.length % layout.sizes["model"]:
        raise UserError(
            f"data.length is {data.length}, which mesh layout {layout.name!r} cannot cut into {layout.sizes['model']} "
            f"equal pieces of the sequence. Take a multiple, or another layout."
        )


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


def shared_tokens(student: Checkpoint, teacher: Checkpoint) -> np.ndarray | None:
    """The teacher's id of each of the student's tokens; None where the tokenizers are one.

    Raises `UserError` where the student knows a token that the teacher does not, saying how they differ.
    """
    difference = compare_tokenizers(teacher.tokenizer, student.tokenizer)
    rows = rows_of(student.tokenizer, teacher.tokenizer)
    if rows is None:
        raise UserError(
            f"The tokenizer of the student {student.source} is not that of the teacher {teacher.source}, and knows "
            f"tokens that the teacher does not:\n{difference.describe()}\nExpected the same one, or one with fewer of "
            f"its tokens."
        )
    return None if np.array_equal(rows, np.arange(teacher.tokenizer.vocab_size)) else rows


def build_head(config: RunConfig) -> AbstractHead:
    """The head that the run file asks for."""
    head = config.head
    budget = None if head.memory_budget_mib is None else head.memory_budget_mib * 2**20
    held = None if head.logits_dtype == "float32" else head.logits_dtype
    return ReferenceHead() if head.kind == "reference" else FusedHead(head.chunk, budget, held)


def build_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up (the first step already moves), then cosine decay to ``final_fraction`` of the peak."""
    warmup = min(config.warmup_steps, max(steps - 1, 0))
    peak = config.learning_rate
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=peak * config.final_fraction,
    )


def build_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW behind a clip of the global gradient norm; norm scales and biases are not decayed."""
    adamw = optax.adamw(
        schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decayed
    )
    return adamw if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def decayed(params: Any) -> Any:
    """Which parameters weight decay applies to: all but the scales of norms and the biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not str(getattr(path[-1], "key", "")).endswith(("scale", "bias")), params
    )
