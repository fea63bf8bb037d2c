"""Packing: every (token, label) pair of every document exactly once, and nothing else."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_distill.data import Rows, check_vocabulary, pack
from spmd_distill.errors import UserError

tokens = st.lists(st.integers(0, 5), max_size=12).map(lambda ids: np.array(ids, np.int64))
documents = st.lists(tokens, max_size=8)
lengths = st.integers(1, 9)


def pairs(rows: Rows) -> Counter:
    return Counter(zip(rows.tokens[rows.mask].tolist(), rows.labels[rows.mask].tolist(), strict=True))


@given(documents, lengths)
def test_each_pair_of_each_document_is_there_exactly_once_and_in_order(docs, length):
    rows = pack(docs, length)
    expected = [pair for doc in docs for pair in pairwise(doc)]
    assert list(zip(rows.tokens[rows.mask], rows.labels[rows.mask], strict=True)) == expected
    assert rows.valid_tokens == len(expected)


@given(documents, lengths)
def test_segments_are_contiguous_pieces_of_one_document(docs, length):
    # Numbering the tokens of all documents through tells from which document and where each one came.
    numbered, first = [], 0
    for doc in docs:
        numbered.append(np.arange(first, first + len(doc)))
        first += 1000
    rows = pack(numbered, length)
    for row in range(len(rows)):
        seen = rows.segments[row][rows.segments[row] > 0]
        assert np.all(np.diff(seen) >= 0) and set(seen) == set(range(1, seen[-1] + 1))
        assert np.all(rows.segments[row][len(seen) :] == 0), "padding stands at the end only"
        for segment in set(seen):
            at = np.flatnonzero(rows.segments[row] == segment)
            piece = rows.tokens[row, at]
            assert np.all(np.diff(piece) == 1), "a segment skips nothing and crosses no document"
            assert rows.positions[row, at].tolist() == list(range(len(at)))
            assert np.all(rows.labels[row, at][rows.mask[row, at]] == piece[rows.mask[row, at]] + 1)
    assert np.all(rows.segments[:-1] > 0), "only the last row is padded"


@given(documents, lengths)
def test_what_is_not_trained_on_is_masked_and_zero(docs, length):
    rows = pack(docs, length)
    padding = rows.segments == 0
    for array in (rows.tokens, rows.positions, rows.labels, rows.mask):
        assert not array[padding].any()
    assert not rows.labels[~rows.mask].any()
    assert np.count_nonzero(~rows.mask & ~padding) == sum(len(doc) > 1 for doc in docs), "one last token each"


@given(st.lists(tokens, min_size=1, max_size=6), lengths, st.data())
def test_perturbing_one_document_moves_only_its_own_segments(docs, length, data):
    chosen = data.draw(st.integers(0, len(docs) - 1))
    other = [doc + 1 if index == chosen else doc for index, doc in enumerate(docs)]
    before, after = pack(docs, length), pack(other, length)
    marks = [np.full(len(doc), int(index == chosen)) for index, doc in enumerate(docs)]
    own = pack(marks, length).tokens == 1
    assert np.array_equal(before.mask, after.mask)
    assert np.array_equal(before.positions, after.positions)
    assert np.array_equal(before.segments, after.segments)
    assert np.array_equal(before.tokens != after.tokens, own)
    assert np.array_equal(before.labels != after.labels, own & before.mask)


def test_a_small_example_in_full():
    rows = pack([np.array([1, 2, 3]), np.array([4]), np.array([5, 6, 7, 8])], length=4)
    assert rows.tokens.tolist() == [[1, 2, 3, 5], [6, 7, 8, 0]]
    assert rows.labels.tolist() == [[2, 3, 0, 6], [7, 8, 0, 0]]
    assert rows.mask.tolist() == [[True, True, False, True], [True, True, False, False]]
    assert rows.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 0]]
    assert rows.segments.tolist() == [[1, 1, 1, 2], [1, 1, 1, 0]]
    assert rows[1]["tokens"].tolist() == [6, 7, 8, 0] and set(rows[0]) == set(vars(rows))


def test_moving_one_token_moves_exactly_one_pair_in_and_out():
    doc = np.arange(10)
    changed = doc.copy()
    changed[4] = 99
    gone = pairs(pack([doc], 3)) - pairs(pack([changed], 3))
    assert gone == Counter({(3, 4): 1, (4, 5): 1})  # once as label, once as token


def test_an_end_token_is_learnt_although_padding_has_the_same_id():
    end = 0  # the id that padding is filled with
    rows = pack([np.array([7, 8, end])], length=8)
    assert pairs(rows) == Counter({(7, 8): 1, (8, end): 1})


@given(documents, lengths)
def test_every_integer_dtype_packs_to_the_same_rows(docs, length):
    expected = pack(docs, length).fingerprint()
    for dtype in (np.uint8, np.int8, np.uint16, np.int32, np.uint32, np.uint64):
        assert pack([doc.astype(dtype) for doc in docs], length).fingerprint() == expected


def test_the_fingerprint_notices_every_change():
    docs = [np.arange(5), np.arange(7)]
    rows = pack(docs, 4)
    assert rows.fingerprint() == pack(docs, 4).fingerprint()
    others = [
        pack(docs[::-1], 4),
        pack(docs, 3),
        pack([np.concatenate(docs)], 4),
        pack(docs[:1], 4),
        pack([], 4),
    ]
    assert len({rows.fingerprint(), *(other.fingerprint() for other in others)}) == 6


@pytest.mark.parametrize("docs", [[], [np.array([], int)], [np.array([3])], [np.array([3])] * 4])
def test_without_a_pair_there_is_no_row(docs):
    rows = pack(docs, 4)
    assert len(rows) == 0 and rows.valid_tokens == 0 and rows.tokens.shape == (0, 4)


@pytest.mark.parametrize(
    ("docs", "length", "message"),
    [
        ([np.arange(3)], 0, "row length: found 0"),
        ([np.arange(3), np.array([0.5, 1.0])], 4, "document 1: .*float64"),
        ([np.zeros((2, 2), int)], 4, r"document 0: .*shape \(2, 2\)"),
        ([np.array([1, 2, -1])], 4, "document 0, position 2: found token id -1"),
        ([np.array([1, 2**31])], 4, "document 0, position 1: found token id 2147483648"),
    ],
)
def test_what_is_not_tokens_is_refused(docs, length, message):
    with pytest.raises(UserError, match=message):
        pack(docs, length)


@given(documents, lengths, st.integers(1, 7))
@settings(max_examples=50)
def test_the_vocabulary_check_passes_exactly_what_fits(docs, length, vocab_size):
    rows = pack(docs, length)
    if rows.tokens.max(initial=0) < vocab_size:
        check_vocabulary(rows, vocab_size)
    else:
        with pytest.raises(UserError, match="another tokenizer"):
            check_vocabulary(rows, vocab_size)


def test_the_vocabulary_check_names_row_position_and_id():
    rows = pack([np.array([1, 2, 3, 4, 5, 50000, 7])], length=4)
    with pytest.raises(UserError, match=r"row 1, position 1: tokens holds id 50000, expected 0 to 49151 .*; 1 such"):
        check_vocabulary(rows, 49152)
    check_vocabulary(pack([], 4), 49152)


def test_a_million_tokens_are_packed_whole():
    rng = np.random.default_rng(0)
    docs = [rng.integers(0, 49152, size) for size in rng.integers(1, 2000, 1000)]
    assert pack(docs, 512).valid_tokens == sum(len(d) - 1 for d in docs)
