"""Whose tokens, and where they lie: models of unequal vocabularies, and vocabularies spread over the data too."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import TERMS
from problems import DIFFERENT, PADDED, PLAIN, Problem, V, agreement, close, expected, problem, program

from spmd_distill.collectives import psum
from spmd_distill.divergences import CrossEntropy, ForwardKL, ReverseKL, SortedLogitULD
from spmd_distill.errors import UserError
from spmd_distill.head import AGREEMENT, FusedHead, ReferenceHead, Term
from spmd_distill.mappers import make_mapper
from spmd_distill.objective import Objective, WeightedTerm
from spmd_distill.types import Batch, LogitTransform, Unembedded

FUSED = FusedHead(chunk=5)
KINDS = ("forward_kl", "reverse_kl", "sorted_logit_uld", "smoothed", "z_loss")
"""One of each path through a head."""


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def check(found, p: Problem, weights, temperature: float, names=KINDS) -> None:
    each = [expected(p, TERMS[name], temperature) for name in names]
    for name, one in zip(names, each, strict=True):
        close(found.sums[name], one.value, 1e-11, name)
    close(found.value, sum(w * e.value for w, e in zip(weights, each, strict=True)), 1e-11, "loss")
    for of, gradient in found.gradients.items():
        close(gradient, sum(w * e.gradients[of] for w, e in zip(weights, each, strict=True)), 1e-10, of)


# Where the vocabulary lies


@pytest.mark.parametrize(
    ("head", "mapper", "layout"),
    [
        (FUSED, "shard_map", "fsdp8"),
        (FUSED, "pmap", "fsdp4_tp2"),
        (FusedHead(), "shard_map", "tp8"),
        (ReferenceHead(), "shard_map", "fsdp8"),
    ],
)
def test_every_place_of_the_vocabulary_gives_the_same(head, mapper, layout):
    """Over both axes of the mesh, one of them, or none; with chunks that are longer or shorter than a shard's part."""
    p, weights = problem(), np.linspace(0.5, 1.5, len(KINDS))
    terms = tuple(Term(TERMS[name], None, name) for name in KINDS)
    found = program(head, mapper, layout, terms=terms)(p, weights, 1.6)
    check(found, p, weights, 1.6)
    for name, value in agreement(p).items():
        close(found.sums[name], value, 1e-12, name)


# Whose tokens


def by_objective(objective: Objective, p: Problem, head, mapper: str, layout: str):
    """(loss, d hidden, d unembed), (sums) of an objective at step 0."""
    mapping = make_mapper(mapper, layout)
    place = mapping.layout
    columns = (place.spec(("batch", None)), place.spec(("vocab", None)), place.spec(("vocab",)))
    row, whole = place.spec(("batch",)), place.spec(())
    transform_s, transform_t = p.transforms

    def body(hs, ws, bs, ht, wt, bt, labels, mask):
        batch = Batch(labels, labels, mask, labels, labels)
        student, teacher = Unembedded(hs, ws, transform_s, bs), Unembedded(ht, wt, transform_t, bt)
        axes = {"batch_axes": place.batch_axes, "vocab_axes": place.vocab_axes}
        out = objective(head, student, teacher, batch, jnp.int32(0), jnp.int32(1), agreement=True, **axes)
        return psum(out, place.batch_axes)

    run = jax.jit(mapping.map(body, (*columns, *columns, row, row), whole))
    return jax.tree.map(float, run(*p.arrays[:-1]))


def sized(student: int, teacher: int, seed: int = 0) -> Problem:
    p = problem(seed)
    sizes = {"student": student, "teacher": teacher}
    transforms = tuple(replace(t, vocab_size=n) for t, n in zip(p.transforms, sizes.values(), strict=True))
    return replace(p, transforms=transforms, labels=p.labels % min(student, teacher))


OBJECTIVE = Objective(
    (WeightedTerm(ForwardKL(), 0.7, 2.0), WeightedTerm(ReverseKL(), 0.2), WeightedTerm(CrossEntropy(0.1)))
)
WHERE = [(FUSED, "shard_map", "dp2_tp4"), (ReferenceHead(), "vmap", "single")]


@pytest.mark.parametrize(("head", "mapper", "layout"), WHERE, ids=str)
@pytest.mark.parametrize(("student", "teacher"), [(V, V - 6), (V - 6, V)])
def test_the_smaller_vocabulary_is_the_common_one(head, mapper, layout, student, teacher):
    p = sized(student, teacher)
    with pytest.warns(
        UserWarning, match=rf"student has {student} tokens.* teacher {teacher}.* cut to the first {V - 6}"
    ):
        loss, sums = by_objective(OBJECTIVE, p, head, mapper, layout)
    by_hand = sized(V - 6, V - 6)
    parts = [expected(by_hand, t.divergence, t.temperature).value for t in OBJECTIVE.terms]
    close(loss, 0.7 * 4 * parts[0] + 0.2 * parts[1] + parts[2], 1e-12, "loss")
    close([sums[name] for name in OBJECTIVE.labels], parts, 1e-12, "sums")
    for name, value in agreement(by_hand).items():
        close(sums[name], value, 1e-12, name)


@pytest.mark.parametrize("head", [FUSED, ReferenceHead()], ids=lambda h: h.name)
def test_gradients_of_a_cut_vocabulary_are_those_of_a_sliced_one(head):
    """Rows from there on get none."""
    p, weights = sized(V, V - 6), np.linspace(0.5, 1.5, len(KINDS))
    terms = tuple(Term(TERMS[name], None, name) for name in KINDS)
    with pytest.warns(UserWarning, match="both are cut"):
        found = program(head, "vmap", "single", terms=terms, transforms=p.transforms)(p, weights, 1.6)
    check(found, sized(V - 6, V - 6), weights, 1.6)
    assert found.unembed[: V - 6].all() and not found.unembed[V - 6 :].any() and not found.bias[V - 6 :].any()


@pytest.mark.parametrize(("head", "mapper", "layout"), WHERE, ids=str)
def test_a_vocabulary_size_that_is_said_is_taken_without_a_warning(head, mapper, layout):
    p = sized(V, V - 3)
    p = replace(p, labels=p.labels % 20)
    loss, sums = by_objective(replace(OBJECTIVE, vocab_size=20), p, head, mapper, layout)
    by_hand = replace(sized(20, 20), labels=p.labels)
    parts = [expected(by_hand, t.divergence, t.temperature).value for t in OBJECTIVE.terms]
    close(loss, 0.7 * 4 * parts[0] + 0.2 * parts[1] + parts[2], 1e-12, "loss")
    close(sums["acceptance"], agreement(by_hand)["acceptance"], 1e-12, "acceptance")


@pytest.mark.parametrize("vocab_size", [0, -1, V - 2])
def test_a_vocabulary_size_that_is_too_large_is_refused(vocab_size):
    objective = replace(OBJECTIVE, vocab_size=vocab_size)
    with pytest.raises(
        UserError, match=rf"vocab_size is {vocab_size}, .*student has {V} .*expected a number from 1 to {V - 3}"
    ):
        by_objective(objective, sized(V, V - 3), FUSED, "vmap", "single")


def larger_teacher(rows: int, size: int) -> Problem:
    r, p = np.random.default_rng(5), problem()
    transforms = (p.transforms[0], replace(p.transforms[1], vocab_size=size))
    wt, bt = r.normal(size=(rows, p.wt.shape[1])), r.normal(size=rows)
    return replace(p, wt=wt, bt=bt, transforms=transforms)


def test_rows_that_do_not_line_up_are_refused():
    p = larger_teacher(2 * PADDED, V)
    for objective in (OBJECTIVE, replace(OBJECTIVE, vocab_size=20)):
        with pytest.raises(UserError, match=rf"holds {PADDED} rows .* and {2 * PADDED} of the teacher's.*vocab_rows"):
            by_objective(objective, p, FUSED, "vmap", "single")
    mixed = Objective((WeightedTerm(SortedLogitULD()), WeightedTerm(ForwardKL())))  # one of them needs a common one
    with pytest.raises(UserError, match="do not line up"):
        by_objective(mixed, p, ReferenceHead(), "vmap", "single")


@pytest.mark.parametrize(
    ("head", "mapper", "layout"),
    [
        (FUSED, "shard_map", "dp2_tp4"),
        (FusedHead(), "vmap", "fsdp2_tp4"),
        (FUSED, "pmap", "dp4_tp2"),
    ],
)
def test_models_of_different_vocabularies(head, mapper, layout):
    """Sorted probabilities compare them; how much they agree on tokens is then a question without a meaning."""
    p, names = larger_teacher(2 * PADDED, PADDED + 9), ("sorted_logit_uld", "ce", "z_loss")
    weights, terms = np.array([1.0, 0.3, 0.1]), tuple(Term(TERMS[name], None, name) for name in names)
    found = program(head, mapper, layout, terms=terms, transforms=p.transforms)(p, weights, 1.6)
    check(found, p, weights, 1.6, names)
    assert set(found.sums) == {*names, "ce_student", "entropy_student", "entropy_teacher"} < {*names, *AGREEMENT}
    own = agreement(replace(p, ht=p.hs, wt=p.ws, bt=p.bs, transforms=p.transforms[:1] * 2))
    for name in ("ce_student", "entropy_student"):
        close(found.sums[name], own[name], 1e-12, name)


def test_the_oracle_takes_a_forbidden_token_for_one_that_is_not_there():
    """A bias of -inf and a smaller vocabulary are one thing."""
    p = problem(transforms=PLAIN)
    cut = (LogitTransform(V - 6),) * 2
    forbid = np.where(np.arange(PADDED) < V - 6, 0, -np.inf)
    labels = p.labels % (V - 6)
    forbidden = replace(p, bs=p.bs + forbid, bt=p.bt + forbid, labels=labels)
    for name in ("forward_kl", "reverse_kl", "alpha_beta", "ce"):
        shorter = expected(replace(p, transforms=cut, labels=labels), TERMS[name], 1.3)
        close(expected(forbidden, TERMS[name], 1.3).hidden, shorter.hidden, 1e-12, name)
    assert DIFFERENT != PLAIN
