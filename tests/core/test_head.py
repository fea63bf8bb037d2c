"""Heads against a float64 numpy oracle that upcasts before the matmul: every divergence under every head, support,
mapper and type. Axes are covered pairwise where they share no code, and many terms share one compiled program, whose
weights choose one of them at a time.
"""

import contextlib
import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import TERMS
from problems import (
    DIFFERENT,
    DRAWS,
    PLAIN,
    Found,
    N,
    Problem,
    agreement,
    both_logits,
    close,
    expected,
    problem,
    program,
)

from spmd_distill import head, mappers
from spmd_distill.divergences import DIVERGENCES, AbstractLabelLoss, AbstractSeparable
from spmd_distill.head import AGREEMENT, FULL, FusedHead, ReferenceHead, Sampled, Support, Term, TopK

FUSED, REFERENCE = FusedHead(chunk=5), ReferenceHead()
TOP, SAMPLED = TopK(5), Sampled(DRAWS)
F64, F32, BF16 = np.float64, np.float32, jnp.bfloat16


class Case(NamedTuple):
    head: Any
    support: Support
    mapper: str
    layout: str
    dtype: Any

    def __repr__(self):
        names = self.head.name, type(self.support).__name__, self.mapper, self.layout, np.dtype(self.dtype).name
        return "-".join(names).lower()

    @property
    def transforms(self):
        """Low precision meets extreme logits, which a softcap would tame."""
        return DIFFERENT if self.dtype is F64 and self.support is not SAMPLED else PLAIN

    @property
    def names(self) -> list[str]:
        """All terms by name; supports make a difference only to the separable ones."""
        names = list(TERMS) if self.dtype is F64 and self.support is FULL else [*DIVERGENCES, "own"]
        return [n for n in names if self.support is FULL or n == "ce" or isinstance(TERMS[n], AbstractSeparable)]

    def problem(self, scale: float = 1.0, seed: int = 0) -> Problem:
        return problem(seed, scale, self.dtype, self.transforms)

    def __call__(self, p: Problem, weights: Any, temperature: float) -> Found:
        terms = tuple(Term(TERMS[name], None, name) for name in self.names)
        return program(
            self.head, self.mapper, self.layout, terms=terms, support=self.support, transforms=self.transforms
        )(p, weights, temperature)

    def each(self, p: Problem, temperature: float):
        """Every term by itself."""
        for weights, name in zip(np.eye(len(self.names)), self.names, strict=True):
            with precision(self.dtype):
                yield name, self(p, weights, temperature)

    def expected(self, p: Problem, name: str, temperature: float) -> Found:
        if self.support is not SAMPLED:
            return expected(p, TERMS[name], temperature, self.support)
        with precision(F64):  # that its sampling means what it should is for test_support.py
            names = ONE_DEVICE.names
            return ONE_DEVICE(p.exactly, np.eye(len(names))[names.index(name)], temperature)


def precision(dtype: Any):
    """JAX's 64-bit mode for float64 only: that is how low precision is used."""
    return jax.enable_x64(True) if dtype is F64 else contextlib.nullcontext()


ONE_DEVICE = Case(REFERENCE, SAMPLED, "vmap", "single", F64)
EXACT = [
    Case(FUSED, FULL, "shard_map", "dp2_tp4", F64),
    Case(FUSED, TOP, "vmap", "fsdp2_tp4", F64),
    Case(FUSED, SAMPLED, "pmap", "dp2_tp4", F64),
    Case(REFERENCE, FULL, "pmap", "fsdp4_tp2", F64),
    Case(REFERENCE, TOP, "shard_map", "fsdp2_tp4", F64),
]
LOW = [
    Case(FUSED, FULL, "vmap", "dp2_tp4", BF16),
    Case(FUSED, TOP, "pmap", "fsdp2_tp4", F32),
    Case(FUSED, SAMPLED, "shard_map", "fsdp2_tp4", BF16),
    Case(REFERENCE, FULL, "vmap", "dp2_tp4", F32),
    Case(REFERENCE, TOP, "pmap", "dp2_tp4", BF16),
    Case(REFERENCE, SAMPLED, "shard_map", "dp2_tp4", F32),
]


def test_every_axis_meets_every_other():
    """Of what a case is made of, all pairs are here; every divergence is in every case."""
    cases = [*EXACT, *LOW, ONE_DEVICE]
    kinds = {(c.head.name, type(c.support)) for c in cases}
    assert {h for h, _ in kinds} == set(head.HEADS) and len(kinds) == 2 * len(Support.__subclasses__())
    for kind in kinds:
        mine = [c for c in cases if (c.head.name, type(c.support)) == kind]
        assert {c.dtype for c in mine} in ({F64, F32}, {F64, BF16}), kind
    for of in (lambda c: c.head.name, lambda c: type(c.support)):
        for to, all_of_it in ((lambda c: c.mapper, set(mappers.MAPPERS)), (lambda c: c.dtype, {F64, F32, BF16})):
            assert {(of(c), to(c)) for c in cases} == {(x, y) for x in map(of, cases) for y in all_of_it}
    assert {(c.mapper, c.dtype) for c in cases} == {(m, d) for m in mappers.MAPPERS for d in (F64, F32, BF16)}
    separable = {name for name, make in DIVERGENCES.items() if issubclass(make, AbstractSeparable)}
    assert all((set(DIVERGENCES) if c.support is FULL else separable) <= set(c.names) for c in cases)
    assert {getattr(head, n) for n in head.__all__} == set(head.HEADS.values())


@pytest.mark.parametrize("case", EXACT, ids=repr)
def test_every_divergence_equals_the_oracle(case):
    p = case.problem()
    for name, found in case.each(p, 1.7):
        wanted = case.expected(p, name, 1.7)
        close(found.sums[name], wanted.value, 1e-12, name)
        close(found.value, wanted.value, 1e-12, f"{name}, loss")
        for what, gradient in found.gradients.items():
            close(gradient, getattr(wanted, what[2:]), 1e-11, f"{name}, {what}")
    measured = agreement(p)
    assert set(measured) == set(AGREEMENT)
    for name, value in measured.items():
        close(found.sums[name], value, 1e-12, name)


@pytest.mark.parametrize("case", EXACT[:1] + EXACT[4:], ids=repr)
def test_weights_add_up_and_every_temperature_is_meant(case):
    p, weights = case.problem(1), np.linspace(0.5, 1.5, len(case.names))
    for temperature in (0.05, 1.0, 20.0):
        with precision(F64):
            found = case(p, weights, temperature)
        each = [case.expected(p, name, temperature) for name in case.names]
        close(
            found.value, sum(w * e.value for w, e in zip(weights, each, strict=True)), 1e-11, f"loss at {temperature}"
        )
        for what, gradient in found.gradients.items():
            wanted = sum(w * e.gradients[what] for w, e in zip(weights, each, strict=True))
            close(gradient, wanted, 1e-10, f"{what} at {temperature}")


LOGITS_TO_1E4 = 1e3
"""Scale of the hidden states."""


@pytest.mark.parametrize("case", LOW, ids=repr)
def test_low_precision_and_extreme_logits(case):
    """To what rounding allows: a log-probability carries that of z/T, and a gradient cancels terms as large as g/T."""
    for scale, temperature in itertools.product((1.0, LOGITS_TO_1E4), (0.05, 1.0, 20.0)):
        p = case.problem(scale)
        largest = max(np.abs(z).max() for z, _ in both_logits(p))
        rounding = 2.0**-23 * largest / temperature
        for name, found in case.each(p, temperature):
            wanted, what = case.expected(p, name, temperature), f"{name} at {scale:g}, {temperature}"
            finite(found, what)
            assert found.sums[name] >= 0, what
            close(found.sums[name], wanted.value, 1e-5 + rounding, what)
            bar, uncancelled = (1e-2 if case.dtype is BF16 else 1e-5) + rounding, max(1.0, wanted.value) / temperature
            for of, gradient in found.gradients.items():
                factor = {"d hidden": p.ws, "d unembed": p.hs, "d bias": np.ones(1)}[of]
                least = uncancelled * np.abs(factor.astype(F64)).max()
                close(gradient, wanted.gradients[of], bar, f"{what}, {of}", least)


def finite(found: Found, what: str) -> None:
    assert all(np.isfinite(x).all() for x in (found.value, *found.gradients.values(), *found.sums.values())), what


@pytest.mark.parametrize("case", LOW, ids=repr)
@pytest.mark.parametrize("who", ["both", "teacher", "student"])
def test_forbidden_tokens(case, who):
    """A bias of -inf, on both sides or one. What is then infinite is large and finite, with a finite gradient."""
    p, temperature = case.problem(), 0.05 if who == "both" else 1.0
    tokens = np.arange(len(p.bs))
    forbidden = np.isin(tokens, [0, 7, 8, 20, 28]) & ~np.isin(tokens, p.labels[p.mask])
    assert forbidden.sum() >= 2
    bs, bt = (np.where(forbidden, -np.inf, b).astype(b.dtype) for b in (p.bs, p.bt))
    p = replace(p, bs=p.bs if who == "teacher" else bs, bt=p.bt if who == "student" else bt)
    for name, found in case.each(p, temperature):
        what = f"{name}, {who}"
        finite(found, what)
        assert who == "teacher" or not found.bias[forbidden].any(), what
        if name in ("normalized_logit_mse", "smoothed") or (name == "forward_kl" and who == "student"):
            continue  # infinite
        wanted = case.expected(p, name, temperature)
        close(found.sums[name], wanted.value, 1e-4, what)
        for of, gradient in found.gradients.items():
            least = max(1.0, wanted.value) / temperature * 5
            close(gradient, wanted.gradients[of], 2e-2 if case.dtype is BF16 else 1e-4, f"{what}, {of}", least)


# Masks, and models that are the same


@pytest.mark.parametrize("case", [*EXACT, *LOW], ids=repr)
def test_masked_tokens_may_hold_anything_and_a_shard_may_have_none(case):
    clean, weights = case.problem(), np.ones(len(case.names))
    for mask in (clean.mask, clean.mask & (np.arange(N) >= N // 2)):  # nothing on half of the data shards
        clean = replace(clean, mask=mask)
        for poison in (np.nan, -np.inf):
            hidden = {k: np.where(mask[:, None], getattr(clean, k), poison).astype(case.dtype) for k in ("hs", "ht")}
            with precision(case.dtype):
                found, expected = case(replace(clean, **hidden), weights, 1.7), case(clean, weights, 1.7)
            jax.tree.map(np.testing.assert_array_equal, vars(found), vars(expected))
            assert not found.hidden[~mask].any() and found.value > 0
    with precision(case.dtype):
        nothing = case(replace(clean, mask=np.zeros(N, bool)), weights, 1.7)
    assert not nothing.value and not any(nothing.sums.values())
    assert not any(g.any() for g in nothing.gradients.values())


KINKS = ("total_variation", "sorted_logit_uld")


@pytest.mark.parametrize("case", LOW, ids=repr)
def test_a_model_that_is_its_own_teacher(case):
    """Every divergence is 0, and so is its gradient; next to it, where bfloat16 hardly differs, it is not below."""
    p = case.problem()
    same = replace(p, ht=p.hs, wt=p.ws, bt=p.bs)
    step = np.where(np.arange(N)[:, None] % 3 == 0, 2.0**-8, 0)
    near = replace(same, ht=(p.hs.astype(F64) * (1 + step)).astype(case.dtype))
    for temperature in (0.05, 1.0):
        for (name, found), (_, close_by) in zip(
            case.each(same, temperature), case.each(near, temperature), strict=True
        ):
            what = f"{name} at {temperature}"
            if isinstance(TERMS[name], AbstractLabelLoss):
                continue
            # The reference is left to XLA, which need not compute both sides alike.
            assert 0 <= found.value == found.sums[name] <= (0 if case.head is FUSED else 1e-4), what
            for gradient in found.gradients.values():  # absolute values have any slope between -1 and 1 there
                assert np.abs(gradient).max() <= (3e-4 / temperature if name not in KINKS else 1), what
            assert close_by.sums[name] > 0 or (case.support is SAMPLED and close_by.sums[name] == 0), what
        assert found.sums["top1"] == p.mask.sum()
        np.testing.assert_allclose(found.sums["acceptance"], p.mask.sum(), rtol=1e-5)
