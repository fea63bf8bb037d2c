"""What a term between hidden states adds to a compiled step: operations, and memory that is alive at once."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from spmd_distill.divergences import ForwardKL
from spmd_distill.features import ActivationMaps, HiddenStates, Uniform
from spmd_distill.head import FusedHead
from spmd_distill.mappers import make_mapper
from spmd_distill.models import DecoderConfig, decoder
from spmd_distill.objective import FeatureTerm, Objective, WeightedTerm
from spmd_distill.program.flops import count_flops
from spmd_distill.state import abstract_state
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch

ROWS, LENGTH, POOL = 16, 128, 10
STUDENT = DecoderConfig(vocab_size=256, width=64, layers=8, heads=4, kv_heads=4, head_dim=8, mlp=32)
TEACHER = replace(STUDENT, width=96)
S, T, N = STUDENT.width, TEACHER.width, ROWS * LENGTH
PROJECTED, AS_THEY_ARE = HiddenStates(), HiddenStates(pool=POOL)


@cache
def step(loss: HiddenStates | ActivationMaps | None, layout: str, pairs: int) -> tuple[Any, Any]:
    """A step in float32 and its arguments; nothing is run."""
    terms = (FeatureTerm(loss, Uniform(pairs)),) if loss else ()
    student, teacher = decoder(STUDENT), decoder(TEACHER)
    objective = Objective((WeightedTerm(ForwardKL()), *terms))
    run = Distillation(
        student, OnlineTeacher(teacher), objective, make_mapper("shard_map", layout), FusedHead(chunk=64)
    )
    x = jax.ShapeDtypeStruct((1, ROWS, LENGTH), np.int32)
    batch = Batch(x, x, jax.ShapeDtypeStruct(x.shape, np.bool_), x, x)

    def placed(shapes, specs):
        shardings = run.mapper.shardings(specs)
        return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, shardings)

    tx = optax.sgd(0.1)
    weights = placed(teacher.abstract, teacher.specs(run.mapper.layout))
    return run.train_step(tx), (abstract_state(run, tx), weights, placed(batch, run.batch_specs(1)))


@pytest.mark.parametrize("layout", ["dp2_tp4", "sp2_tp4"])
def test_a_term_costs_as_many_operations_as_its_page_says(layout):
    """Forward, again, and back: a projection's are shared by all shards, averages are taken where activations are."""

    def operations(loss, pairs):
        run, given = step(loss, layout, pairs)
        return count_flops(run, *given)

    def added(loss, pairs=1):
        return operations(loss, pairs) - operations(None, 1)

    assert added(PROJECTED) == 8 * N * S * T and added(PROJECTED, 4) == 4 * 8 * N * S * T
    times = 4 if layout == "dp2_tp4" else 1  # every shard of `model` looks at activations that are whole
    assert added(AS_THEY_ARE) == times * (6 * S + 4 * T) * N * POOL
    assert added(ActivationMaps()) == 0


@pytest.mark.parametrize(
    ("loss", "layout"),
    [(PROJECTED, "dp2_tp4"), (PROJECTED, "sp2_tp4"), (ActivationMaps(), "sp2_tp4")],
    ids=lambda x: getattr(x, "name", x),
)
def test_a_pair_of_layers_holds_what_its_page_says(loss, layout):
    """The student's hidden states and their gradient, the teacher's, and the gradient of W: no more, to the byte."""

    def memory(pairs):
        run, given = step(loss, layout, pairs)
        return run.lower(*given).compile().memory_analysis().temp_size_in_bytes

    tokens = N // 2 // (4 if layout == "sp2_tp4" else 1)
    a_pair = 4 * (tokens * (2 * S + T) + (S * T if loss is PROJECTED else 0))
    assert (memory(4) - memory(2)) / 2 == pytest.approx(a_pair, rel=0.02)
