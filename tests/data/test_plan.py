"""Packing by a plan: every label that counts exactly once, in its own segment, and hardly any room left."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_distill.data import PackedRows, TokenTable, pack, plan
from spmd_distill.data.base import Example
from spmd_distill.data.rows import FIELDS
from spmd_distill.data.rows.plan import first_fit
from spmd_distill.errors import UserError

HOWS = ("first_fit", "concatenate", "none")
flags = st.lists(st.booleans(), max_size=14)
examples = st.lists(flags, max_size=9).map(
    # the tokens of all examples are numbered through: each tells where it came from
    lambda all_flags: [
        Example(np.arange(len(f), dtype=np.int32) + 100 * i, np.array(f, bool)) for i, f in enumerate(all_flags)
    ]
)
lengths = st.integers(1, 9)


def packed(docs, length, how, documents=None) -> PackedRows:
    table = TokenTable.of(docs)
    return PackedRows(table, plan(table, length, how, documents))


def everything(rows):
    return rows.take(range(len(rows)))


def labels_of(docs) -> Counter:
    """What must be learnt: (token, label) wherever the label is flagged and has a token before it."""
    return Counter(
        (int(d.tokens[i]), int(d.tokens[i + 1])) for d in docs for i in range(len(d.tokens) - 1) if d.loss[i + 1]
    )


@given(docs=examples, length=lengths, how=st.sampled_from(HOWS))
@settings(max_examples=150, deadline=None)
def test_every_label_that_counts_is_there_once_in_its_own_segment(docs, length, how):
    rows = packed(docs, length, how)
    taken = everything(rows)
    found = Counter(zip(taken.tokens[taken.mask].tolist(), taken.labels[taken.mask].tolist(), strict=True))
    assert found == labels_of(docs)
    assert rows.valid_tokens == sum(found.values()) == taken.valid_tokens
    assert not taken.labels[~taken.mask].any() and not taken.tokens[taken.segments == 0].any()
    assert not taken.mask[taken.segments == 0].any() and not taken.positions[taken.segments == 0].any()
    for row in range(len(rows)):
        segments = taken.segments[row]
        used = segments[segments > 0]
        assert len(used) and np.all(segments[len(used) :] == 0), "padding stands at the end only"
        assert np.array_equal(np.unique(used), np.arange(1, used[-1] + 1)) and np.all(np.diff(used) >= 0)
        for segment in range(1, used[-1] + 1):
            at = segments == segment
            assert np.all(np.diff(taken.tokens[row, at]) == 1), "a segment is a contiguous piece of one example"
            assert np.array_equal(taken.positions[row, at], np.arange(at.sum()))


@given(docs=examples, length=lengths)
@settings(max_examples=100, deadline=None)
def test_concatenate_is_the_exact_cut_with_the_flags_on_top(docs, length):
    expected, rows = pack([d.tokens for d in docs], length), packed(docs, length, "concatenate")
    taken = everything(rows)
    assert len(rows) == len(expected)
    for name in ("tokens", "positions", "segments"):
        assert np.array_equal(getattr(taken, name), getattr(expected, name))
    flagged = {int(t) for d in docs for t in d.tokens[d.loss]}
    assert np.array_equal(taken.mask, expected.mask & np.isin(expected.labels, list(flagged)))
    assert np.array_equal(taken.labels, np.where(taken.mask, expected.labels, 0))


@given(docs=examples, length=lengths)
@settings(max_examples=60, deadline=None)
def test_only_what_is_longer_than_a_row_is_cut(docs, length):
    for how in ("first_fit", "none"):
        taken = everything(packed(docs, length, how))
        rows_of = Counter()
        for row in range(len(taken)):
            rows_of.update({int(t) // 100 for t in taken.tokens[row][taken.mask[row]]})
        for number, doc in enumerate(docs):
            assert rows_of[number] <= max(1, -(-(len(doc.tokens) - 1) // length))
        if how == "none":
            assert taken.segments.max(initial=0) <= 1


@given(docs=examples, length=lengths, how=st.sampled_from(HOWS), order=st.randoms())
@settings(max_examples=60, deadline=None)
def test_rows_come_alone_as_they_come_together(docs, length, how, order):
    rows = packed(docs, length, how)
    numbers = list(range(len(rows))) * 2
    order.shuffle(numbers)
    whole, mixed = everything(rows), rows.take(numbers)
    at = np.array(numbers, int)
    assert len(rows.take([])) == 0 and rows.take([]).length == length
    for name in FIELDS:
        assert np.array_equal(getattr(mixed, name), getattr(whole, name)[at])
        assert getattr(mixed, name).dtype == getattr(pack([np.arange(3)], 2), name).dtype
    assert np.array_equal(everything(rows.subset(numbers[:3])).tokens, whole.tokens[at[:3]])
    assert rows.subset(numbers[:3]).valid_tokens == whole.take(numbers[:3]).valid_tokens


@given(sizes=st.lists(st.integers(1, 10), max_size=60), window=st.integers(1, 70))
@settings(max_examples=80, deadline=None)
def test_first_fit_is_that_of_a_slow_oracle(sizes, window):
    found = first_fit(np.array(sizes, np.int32), 10, window)
    for first in range(0, len(sizes), window):
        part, bins = list(enumerate(sizes))[first : first + window], []
        for piece, size in sorted(part, key=lambda x: -x[1]):
            fitting = next((b for b in bins if sum(sizes[i] for i in b) + size <= 10), None)
            if fitting is None:
                bins.append([piece])
            else:
                fitting.append(piece)
        groups: dict[int, list[int]] = {}
        for piece, _ in part:
            groups.setdefault(int(found[piece]), []).append(piece)
        assert sorted(groups.values()) == sorted(sorted(b) for b in bins)
        assert list(groups) == sorted(groups), "rows are numbered in the order of their first piece"
    assert np.array_equal(np.unique(found), np.arange(found.max(initial=-1) + 1))


def test_only_the_chosen_examples_are_laid_out():
    docs = [Example(np.arange(4, dtype=np.int32) + 10 * i, np.ones(4, bool)) for i in range(6)]
    for how in HOWS:
        rows = everything(packed(docs, 8, how, np.array([1, 4])))
        assert {int(t) // 10 for t in rows.tokens[rows.mask]} == {1, 4}


def test_mixed_sizes_fill_rows_and_the_density_says_so():
    sizes = np.random.default_rng(0).integers(2, 400, 3000)
    docs = [Example(np.arange(n, dtype=np.int32), np.ones(n, bool)) for n in sizes]
    dense, alone = packed(docs, 512, "first_fit"), packed(docs, 512, "none")
    assert dense.density > 0.99 > 0.5 > alone.density
    taken = everything(alone)
    assert np.isclose(alone.density, np.mean(taken.segments > 0))


def test_what_follows_the_last_label_is_left_out():
    flagged = np.array([False, False, True, True, False, False, False])
    rows = everything(packed([Example(np.arange(7, dtype=np.int32), flagged)], 8, "first_fit"))
    assert rows.tokens.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]] and rows.labels[0, 1:3].tolist() == [2, 3]
    # the second piece is the user's alone
    assert len(packed([Example(np.arange(7, dtype=np.int32), flagged)], 3, "none")) == 1


def test_the_fingerprint_notices_every_change():
    docs = [Example(np.arange(n, dtype=np.int32), np.ones(n, bool)) for n in (5, 7, 3)]
    first = packed(docs, 4, "first_fit")
    assert first.fingerprint() == packed(docs, 4, "first_fit").fingerprint()
    masked = [Example(d.tokens, np.arange(len(d.tokens)) != 2) for d in docs]
    others = [
        packed(docs[::-1], 4, "first_fit"), packed(docs, 5, "first_fit"), packed(docs, 4, "none"),
        packed(masked, 4, "first_fit"), packed(docs[:2], 4, "first_fit"), first.subset([0]),
    ]  # fmt: skip
    assert len({first.fingerprint(), *(other.fingerprint() for other in others)}) == 7


def test_what_cannot_be_laid_out_is_refused():
    table = TokenTable.of([Example(np.arange(3, dtype=np.int32), np.ones(3, bool))])
    with pytest.raises(UserError, match="row length: found 0"):
        plan(table, 0, "none")
    with pytest.raises(UserError, match=r"'best'.*first_fit, concatenate or none"):
        plan(table, 4, "best")
    with pytest.raises(UserError, match=r"text: example 0, position 2: found token id 2, expected 0 to 1"):
        table.check_vocabulary(2, "text")
    table.check_vocabulary(3, "text")
