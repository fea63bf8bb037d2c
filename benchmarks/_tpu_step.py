"""The whole training step on a mesh of TPUs, compiled ahead of time: 1.2 billion parameters learn from 8.

The sizes are those of Llama 3.2 1B and Llama 3.1 8B. Parameters, compute and Adam's moments are bfloat16; teacher,
student, loss, gradients and update are one program, `Distillation.train_step`, on rows of 2048 tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _report import OURS, Row
from _tpu_compile import HBM, LINK, TFLOPS, Figures, chunk_of, measure

from spmd_distill.divergences import ForwardKL
from spmd_distill.head import FusedHead
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import DecoderConfig, decoder
from spmd_distill.models.rope import Rope
from spmd_distill.objective import Objective
from spmd_distill.state import abstract_state
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch

NAME = "tpu-step"
VOCAB = 128256
SHARED = {"vocab_size": VOCAB, "heads": 32, "kv_heads": 8, "rope": Rope(500000.0), "param_dtype": "bfloat16"}
TEACHER = DecoderConfig(width=4096, layers=32, head_dim=128, mlp=14336, tied=False, **SHARED)
STUDENT = DecoderConfig(width=2048, layers=16, head_dim=64, mlp=8192, tied=True, **SHARED)

TEMPORARIES_BAR, WIRE_BAR = 2.2, 13.0
"""GiB a device, at `BAR_BATCH` rows of `BAR_LENGTH`: temporaries with remat, and bytes on the wire of a step."""
BAR_BATCH, BAR_LENGTH = 8, 2048


@dataclass(frozen=True)
class StepProblem:
    """A batch of so many rows, and what of the student's layers is kept for the backward pass."""

    batch: int = BAR_BATCH
    length: int = BAR_LENGTH
    remat: str = "sums"
    micro_batches: int = 1

    @property
    def flops(self) -> int:
        """Of all matmuls, the student's three times; attention is not halved for being causal, nothing is repeated."""
        return self._forward(TEACHER) + 3 * self._forward(STUDENT)

    def _forward(self, c: DecoderConfig) -> int:
        attention = 2 * c.width * 2 * (c.heads + c.kv_heads) * c.head_dim + 4 * self.length * c.heads * c.head_dim
        return self.batch * self.length * (c.layers * (attention + 6 * c.width * c.mlp) + 2 * c.width * VOCAB)


def trace(problem: StepProblem, mapper: AbstractMapper, head: FusedHead) -> tuple[Any, int]:
    """The step, traced on shapes, and the chunks of the head's loop if all tokens are valid."""
    student = decoder(replace(STUDENT, remat=problem.remat, max_length=problem.length))
    teacher = OnlineTeacher(decoder(replace(TEACHER, max_length=problem.length)))
    objective = Objective.mix(ForwardKL(), 0.5, 2.0)
    run = Distillation(student, teacher, objective, mapper, head, compute_dtype=jnp.bfloat16)
    tx, layout = optax.adamw(1e-4), mapper.layout

    def place(shapes: Any, specs: Any) -> Any:
        shardings = mapper.shardings(specs)
        return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, shardings)

    rows = problem.batch // problem.micro_batches
    ints, bools = (
        jax.ShapeDtypeStruct((problem.micro_batches, rows, problem.length), t) for t in (jnp.int32, jnp.bool_)
    )
    batch = place(Batch(ints, ints, bools, ints, ints), run.batch_specs(1))
    params = place(teacher.model.abstract, teacher.model.specs(layout))
    traced = run.train_step(tx).trace(abstract_state(run, tx), params, batch)
    vocab = VOCAB // math.prod(layout.sizes[a] for a in layout.vocab_axes)
    cut = math.prod(layout.sizes[a] for a in layout.batch_axes if a not in layout.vocab_axes)
    return traced, -(-rows * problem.length // cut // chunk_of(traced, vocab, TEACHER.width))


def rows(problem: StepProblem, mapper: AbstractMapper, head: FusedHead, setting: dict[str, Any]) -> Iterator[Row]:
    """Compile and measure; a step that does not fit misses its bar."""
    setting = setting | {"batch": problem.batch, "length": problem.length, "remat": problem.remat}
    if problem.micro_batches > 1:
        setting |= {"micro-batches": problem.micro_batches}
    in_use = "in use, arguments included"
    try:
        found = measure(*trace(problem, mapper, head))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        yield Row(NAME, OURS, setting, in_use, None, f"does not fit: {_first(error)}", HBM, False)
        return
    small = (problem.batch, problem.length) == (BAR_BATCH, BAR_LENGTH)
    yield Row.at_most(NAME, OURS, setting, in_use, found.total, "GiB", HBM)
    for metric, value, bar in (
        ("temporaries", found.temp, TEMPORARIES_BAR if small and problem.remat in ("sums", "full") else None),
        ("arguments", found.argument, None),
        ("peak of the plan, arguments included", found.peak, None),
        ("outputs not in place", found.output - found.alias, None),
        ("on the wire", found.wire, WIRE_BAR if small else None),
    ):
        row = Row(NAME, OURS, setting, metric, value, "GiB")
        yield row if bar is None else Row.at_most(NAME, OURS, setting, metric, value, "GiB", bar)
    yield from _times(problem, mapper, found, setting)


def _times(problem: StepProblem, mapper: AbstractMapper, found: Figures, setting: dict[str, Any]) -> Iterator[Row]:
    for kind, traffic in sorted(found.program.by_kind.items()):
        yield Row(NAME, OURS, setting, f"{kind} on the wire ({traffic.count})", traffic.wire_bytes / 2**30, "GiB")
    ideal = problem.flops / mapper.layout.device_count / TFLOPS
    yield Row(NAME, OURS, setting, "cycles", found.cycles * 1e3, "ms")
    yield Row(NAME, OURS, setting, "on the wire, one link", found.program.total.wire_bytes / LINK * 1e3, "ms")
    yield Row(NAME, "matmuls alone", setting, "MXU ideal", ideal * 1e3, "ms")


def _first(error: Exception) -> str:
    """What of the compiler's complaint says most."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "exceed" in line or "Ran out" in line), lines[0])[:240]
