"""Supports: the teacher's likeliest tokens and one bucket for the rest; a random sample that is right on average."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from oracle import TERMS
from problems import DIFFERENT, PLAIN, Found, N, Problem, V, close, expected, problem, program

from spmd_distill.divergences import ForwardKL
from spmd_distill.errors import UserError
from spmd_distill.head import FULL, FusedHead, ReferenceHead, Sampled, Support, Term, TopK

SEPARABLE = ("forward_kl", "reverse_kl", "total_variation", "alpha_beta")
MIXED = ("forward_kl", "reverse_kl", "alpha_beta", "sorted_logit_uld", "ce")


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def each(head, mapper: str, layout: str, support: Support, p: Problem, names: tuple[str, ...]):
    """(name, what the head finds), at temperature 1.3, one program for all."""
    terms = tuple(Term(TERMS[name], None, name) for name in names)
    run = program(head, mapper, layout, terms=terms, support=support, transforms=p.transforms)
    for name, weights in zip(names, np.eye(len(names)), strict=True):
        yield name, run(p, weights, 1.3)


def same(found: Found, wanted: Found, bar: float, what: str, times: float = 1.0) -> None:
    close(found.value / times, wanted.value, bar, what)
    for of in ("d unembed", "d bias"):
        close(found.gradients[of] / times, wanted.gradients[of], bar, f"{what}, {of}")


# The likeliest


@pytest.mark.parametrize(
    ("head", "mapper", "layout", "k"),
    [
        (FusedHead(chunk=5), "shard_map", "tp8", V),  # each shard has 4 rows of the vocabulary to offer
        (FusedHead(chunk=5), "shard_map", "fsdp2_tp4", V + 100),
        (ReferenceHead(), "vmap", "single", V),
        (ReferenceHead(), "vmap", "single", V + 100),
    ],
)
def test_as_many_as_there_are_is_all_of_them(head, mapper, layout, k):
    """Terms that are no sums over the vocabulary take no notice of a support."""
    p = problem()
    for name, found in each(head, mapper, layout, TopK(k), p, MIXED):
        wanted = expected(p, TERMS[name], 1.3, FULL)
        same(found, wanted, 1e-11, name)
        close(found.hidden, wanted.hidden, 1e-11, name)


def test_more_tokens_bound_it_better():
    """Merging tokens cannot raise an f-divergence: the value grows with k, up to the whole."""
    p = problem()
    for name in ("forward_kl", "reverse_kl", "total_variation", "alpha", "generalized_jsd", "skew_kl"):
        values = [expected(p, TERMS[name], 1.3, support).value for support in (*map(TopK, (1, 4, 12)), FULL)]
        assert all(x < y for x, y in itertools.pairwise(values)), f"{name}: {values}"


def test_mass_outside_is_neither_lost_nor_free():
    """A student that agrees on the k tokens' proportions alone is told so."""
    p = problem(transforms=PLAIN)
    p = replace(p, ht=p.hs, wt=p.ws, bt=p.bs)
    top = np.argsort(-(p.hs @ p.ws[:V].T + p.bs[:V]), -1)[:, :5]
    outside = np.setdiff1d(np.arange(V), np.unique(top[p.mask]))
    assert len(outside)
    moved = replace(p, bs=p.bs + 2 * np.isin(np.arange(len(p.bs)), outside))
    run = program(ReferenceHead(), "vmap", "single", terms=(Term(ForwardKL()),), support=TopK(5), transforms=PLAIN)
    assert run(p, 1.0, 1.0).value == pytest.approx(0, abs=1e-12)
    assert run(moved, 1.0, 1.0).value > 1e-3


# A sample


@pytest.mark.parametrize(
    ("head", "layout", "support"),
    [
        (FusedHead(chunk=512), "dp2_tp4", Sampled(3)),
        (FusedHead(chunk=512), "single", Sampled(1, 1.0)),
        (ReferenceHead(), "single", Sampled(2, 0.25)),
    ],
    ids=str,
)
def test_value_and_gradient_of_a_sample_are_right_on_average(head, layout, support):
    """Every row is the same token. Over an even grid of random numbers in every stratum the average is exact, but for
    the grid's own width.
    """
    rows, one = 4096, problem(3, scale=0.3)
    grid = np.tile((np.arange(rows)[:, None] + 0.5) / rows, (1, support.draws))
    one = replace(one, **{k: getattr(one, k)[-1:] for k in ("hs", "ht", "labels")}, mask=np.ones(1, bool))
    many = {k: np.repeat(getattr(one, k), rows, 0) for k in ("hs", "ht", "labels", "mask")}
    p = replace(one, **many, uniforms=grid)
    for name, found in each(head, "vmap", layout, support, p, SEPARABLE):
        same(found, expected(one, TERMS[name], 1.3), 1e-2 if support.teacher_fraction < 1 else 5e-2, name, rows)


def test_a_sample_differs_with_the_random_numbers_and_fades_near_the_teacher():
    p = problem(transforms=PLAIN)
    run = program(ReferenceHead(), "vmap", "single", terms=(Term(ForwardKL()),), support=Sampled(7), transforms=PLAIN)

    def spread(p: Problem) -> float:
        draws = [run(replace(p, uniforms=np.random.default_rng(i).random((N, 7))), 1.0, 1.0).bias for i in range(8)]
        return float(np.std(draws, 0).max())

    near = replace(p, ht=p.hs + 1e-3 * p.ht, wt=p.ws, bt=p.bs)
    assert spread(p) > 0.1 and spread(near) < 0.01


# What cannot be


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(0), "TopK: k is 0"),
        (lambda: Sampled(0), "Sampled: draws is 0"),
        (lambda: Sampled(4, 0.0), "teacher_fraction is 0.0; expected 0 <"),
        (lambda: Sampled(4, 1.5), "teacher_fraction is 1.5"),
    ],
)
def test_settings_out_of_range_are_named(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_a_sample_needs_random_numbers():
    p, terms = replace(problem(), uniforms=None), (Term(ForwardKL()),)
    run = program(FusedHead(), "vmap", "single", terms=terms, support=Sampled(4), transforms=DIFFERENT)
    with pytest.raises(UserError, match="pass uniforms"):
        run(p, 1.0, 1.0)
