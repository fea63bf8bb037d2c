"""What cannot move a head's result: the order of tokens, padding between them, and the size of a chunk."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import TERMS
from problems import N, close, problem, program

from spmd_distill.head import FusedHead, Term, TopK
from spmd_distill.head.fused import LIVE_BUFFERS

KINDS = ("alpha_beta", "sorted_logit_uld", "ce")
ALL = tuple(Term(TERMS[name], None, name) for name in KINDS)
CHUNKS = (1, 7, N + 100, None)
WEIGHTS = np.linspace(0.5, 1.5, len(KINDS))


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def run(chunk: int | None, **how):
    return program(FusedHead(chunk=chunk), "vmap", "single", terms=ALL, support=TopK(6), **how)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    seed=st.integers(0, 3),
    order=st.permutations(range(N)),
    valid=st.lists(st.booleans(), min_size=N, max_size=N),
    chunk=st.sampled_from(CHUNKS),
)
def test_neither_order_nor_padding_nor_chunks_matter(seed, order, valid, chunk):
    """Tokens in another order and among padding that holds anything, against the same ones in chunks of five."""
    p = replace(problem(seed), mask=np.array(valid))
    wanted = run(5)(p, WEIGHTS, 1.4)
    moved = {k: getattr(p, k)[list(order)] for k in ("hs", "ht", "labels", "mask", "uniforms")}
    for k in ("hs", "ht"):
        moved[k] = np.where(moved["mask"][:, None], moved[k], np.nan)
    found = run(chunk)(replace(p, **moved), WEIGHTS, 1.4)
    for name, value in wanted.sums.items():
        close(found.sums[name], value, 1e-12, name)
    close(found.value, wanted.value, 1e-12, "loss")
    close(found.hidden, wanted.hidden[list(order)], 1e-11, "d hidden")
    close(found.unembed, wanted.unembed, 1e-11, "d unembed")
    close(found.bias, wanted.bias, 1e-11, "d bias")


def test_the_chunk_follows_what_it_may_take():
    def size(head: FusedHead, tokens: int, vocab: int = 1000, width: int = 64) -> int:
        return head.chunk_size(tokens, vocab, width)

    budget = FusedHead(memory_budget=LIVE_BUFFERS * 4 * 1000 * 64)
    assert size(budget, 4096) == 64
    assert size(budget, 10) == 10
    assert size(budget, 100) == 56, "two even chunks, not 64 and 36"
    assert size(FusedHead(memory_budget=1), 4096, 50_000) == 8
    assert size(FusedHead(chunk=7), 4096) == 7 and size(FusedHead(chunk=7), 3) == 3
    # Without either, half the width, in tiles of 128.
    assert size(FusedHead(), 4096) == 128
    assert size(FusedHead(), 10_000, width=2048) == 1024
    assert size(FusedHead(), 1500, width=2048) == 768, "two even chunks"


def test_a_call_for_the_value_alone_gives_the_same():
    """Evaluation takes another way through the head, which makes no gradients."""
    p = problem()
    wanted, found = run(5)(p, WEIGHTS, 1.4), run(5, gradients=False)(p, WEIGHTS, 1.4)
    close(found.value, wanted.value, 1e-14, "loss")
    assert found.sums == pytest.approx(wanted.sums, rel=1e-13)
