"""From a run file to the parts of a run: mapper, teacher, student, objective, optimizer."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd_distill.compose import (
    Objective,
    build_objective,
    describe,
    describe_vocabulary,
    evenly_paired,
    moving_numbers,
    shared_vocabulary,
    with_pairs,
)
from spmd_distill.config import RunConfig
from spmd_distill.corpus import Corpus, load_corpus
from spmd_distill.distributed import check_devices
from spmd_distill.errors import UserError
from spmd_distill.head import AbstractHead, FusedHead, ReferenceHead
from spmd_distill.loading import Say
from spmd_distill.mappers import AbstractMapper, make_mapper
from spmd_distill.optimizer import UpdateRule, build_rule, build_schedule
from spmd_distill.step import Distillation
from spmd_distill.student import Pair, build_pair, prune_start
from spmd_distill.teachers import OnlineTeacher


@dataclass(frozen=True)
class Setup:
    """The parts of a run, built but holding no array yet."""

    config: RunConfig
    pair: Pair
    run: Distillation
    tx: UpdateRule
    schedule: optax.Schedule
    """Learning rate by optimizer step."""

    def scheduled(self, step: int, skipped: int = 0) -> dict[str, float]:
        """The learning rate, the micro-batches, and whatever else moves, in the optimizer step after ``step`` of them.

        ``skipped`` of those steps updated nothing: the optimizer, and the learning rate with it, has not seen them.
        """
        learning_rate = float(np.asarray(self.schedule(step - skipped)))
        moving = moving_numbers(self.run.objective, step)
        return {"learning_rate": learning_rate, "micro_batches": self.config.data.micro_batches, **moving}

    def objective_for(self, student: int, teacher: int) -> Objective:
        """The objective for models of fewer layers, whose terms inside the network look at as many pairs, or at all."""
        compared = self.run.inside.compared
        return with_pairs(
            self.run.objective, {c.label: evenly_paired(len(c.pairs), student, teacher) for c in compared}
        )

    def introduction(self, tokens: int) -> str:
        """What is about to run, as it was really put together, for people."""
        run, objective = self.run, self.run.objective
        teacher, student, layout = self.pair.teacher, self.pair.student, run.mapper.layout
        grid = " x ".join(f"{axis} {n}" for axis, n in layout.sizes.items())
        sizes = self.pair.tokenizer.vocab_size, teacher.config.tokens, student.config.tokens
        return (
            f"teacher: {teacher.config.layers} layers, {teacher.parameter_count / 1e6:.3g}M parameters; student: "
            f"{self.pair.beginning()}, {student.parameter_count / 1e6:.3g}M parameters\n"
            f"mesh {layout.name} ({grid}) on {len(run.mapper.devices)} {run.mapper.devices[0].platform} device(s), "
            f"mapper {run.mapper.name}, head {run.head.name}; {tokens:,} tokens to train on\n"
            f"objective: {describe(objective, run.inside)}\n{describe_vocabulary(objective, *sizes)}"
        )


def prepare(config: RunConfig, folder: Path, stage: Any, say: Say = lambda message: None) -> Path | None:
    """Make in ``folder`` what the student starts from, where it has to be pruned; see `prune_start`."""
    return prune_start(config, folder, checked_mapper(config), stage, say)


def set_up(config: RunConfig, say: Say = lambda message: None, start: Path | None = None) -> Setup:
    """Open the teacher and put the run together. Raises `UserError` for everything that does not fit.

    ``start`` is what `prepare` returned; without it, the parameters of a student that has to be pruned are random.
    """
    mapper = checked_mapper(config)
    pair = build_pair(config, say, start)
    for model in (pair.teacher, pair.student):
        model.specs(mapper.layout)  # says now what does not fit
    counts = pair.tokenizer.vocab_size, pair.teacher.config.tokens, pair.student.config.tokens
    vocabulary = shared_vocabulary(config.objective.vocab_size, *counts)
    run = Distillation(
        pair.student,
        OnlineTeacher(pair.teacher),
        build_objective(config.objective, vocabulary, say),
        mapper,
        build_head(config),
        jnp.dtype(config.precision.compute),
        jnp.dtype(config.precision.gradients),
    )
    schedule = build_schedule(config.optimizer, config.steps)
    rule = build_rule(config.optimizer, config.precision, schedule, run.trained)
    run.state_shardings(rule)  # says now what the platform does not have
    return Setup(config, pair, run, rule, schedule)


def load_text(setup: Setup, say: Say = lambda message: None) -> Corpus:
    """Training rows and held-out sets, tokenised (or found in the cache) and checked against the vocabulary."""
    config = setup.config
    vocab = setup.run.objective.vocab_size or setup.pair.student.config.tokens
    return load_corpus(config.data, setup.pair.tokenizer, vocab, config.eval.rows, say)


def checked_mapper(config: RunConfig) -> AbstractMapper:
    """The run's mapper, for a batch that it can cut; JAX has float64 from here on where the run file asks for it."""
    types = config.precision
    if "float64" in (types.compute, types.teacher, types.student):
        jax.config.update("jax_enable_x64", True)
    mapper = build_mapper(config.mesh, config.mapper)
    check_devices(mapper.devices, mapper.layout.name)
    check_batch(config, mapper)
    return mapper


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


def build_head(config: RunConfig) -> AbstractHead:
    """The head that the run file asks for."""
    head = config.head
    budget = None if head.memory_budget_mib is None else head.memory_budget_mib * 2**20
    held = None if head.logits_dtype == "float32" else head.logits_dtype
    return ReferenceHead() if head.kind == "reference" else FusedHead(head.chunk, budget, held)
