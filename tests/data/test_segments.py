"""Packed documents do not see each other: a token that changes moves no loss of another segment of its row."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_distill.data import PackedRows, TokenTable, eval_batches, plan
from spmd_distill.data.base import Example
from spmd_distill.divergences import ForwardKL
from spmd_distill.head import ReferenceHead
from spmd_distill.mappers import make_mapper
from spmd_distill.models import DecoderConfig, decoder
from spmd_distill.objective import Objective
from spmd_distill.state import init_params
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher

VOCAB, LENGTH = 30, 12


@pytest.fixture(scope="module")
def loss():
    """The summed loss of a batch, and how many labels it is over."""
    model = decoder(DecoderConfig(vocab_size=VOCAB, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=24))
    mapper = make_mapper("vmap", "single")
    run = Distillation(model, OnlineTeacher(model), Objective.mix(ForwardKL()), mapper, ReferenceHead())
    step, student, teacher = run.eval_step(), init_params(model, mapper, seed=0), init_params(model, mapper, seed=1)

    def of(batch):
        found = step(student, teacher, batch, jnp.int32(0))["loss"]
        return float(found.sum), int(found.count)

    return of


@pytest.mark.parametrize("how", ["first_fit", "concatenate"])
def test_changing_a_token_moves_the_loss_of_its_own_segment_alone(how, loss):
    random = np.random.default_rng(0)
    docs = [random.integers(1, VOCAB, n).astype(np.int32) for n in (5, 4, 3, 6, 5)]
    flags = [np.arange(len(doc)) >= (2 if number == 1 else 0) for number, doc in enumerate(docs)]  # one has a prompt
    table = TokenTable.of(Example(*pair) for pair in zip(docs, flags, strict=True))
    (batch,) = eval_batches(PackedRows(table, plan(table, LENGTH, how)), 4)
    moved = 0
    for row, segment in {(r, s) for r, line in enumerate(batch.segments) for s in set(line) - {0}}:
        own = (batch.segments == segment) & (np.arange(4)[:, None] == row)
        first = np.argwhere(own)[0]
        changed = batch.tokens.copy()
        changed[tuple(first)] = (changed[tuple(first)] + 7) % VOCAB
        for mask, same in ((batch.mask & ~own, True), (batch.mask & own, False)):
            before, after = loss(batch.replace(mask=mask)), loss(batch.replace(mask=mask, tokens=changed))
            assert before[1] == after[1] == mask.sum()
            assert (before == after) == (same or not mask.any()), (row, segment)
            moved += before != after
    assert moved >= 4
