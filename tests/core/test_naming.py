"""Rules between checkpoints and parameters: shapes turned as einops turns them, whole or a box at a time."""

import itertools

import einops
import numpy as np
import pytest

from spmd_distill.models.naming import (
    Part,
    Rule,
    Turn,
    linear,
    per_head_in,
    per_head_out,
    per_head_vector,
    same,
    vocab_rows,
)

TURNS = {
    "vector": (same(), "d -> d", (6,)),
    "matrix": (same(), "a b -> a b", (6, 4)),
    "linear": (linear(), "o i -> i o", (6, 4)),
    "per_head_out": (per_head_out(3), "(h c) d -> d h c", (8, 3, 4)),
    "per_head_in": (per_head_in(3), "d (h c) -> h c d", (3, 4, 8)),
    "per_head_vector": (per_head_vector(3), "(h c) -> h c", (3, 4)),
    "three": (Turn(((2, 0), (1,))), "(c a) b -> a b c", (4, 3, 2)),
}


def boxes(shape: tuple[int, ...]):
    """Every way of cutting each dimension into halves, thirds or not at all."""
    cuts = [[slice(n * i // k, n * (i + 1) // k) for k in (1, 2, 3) for i in range(k)] for n in shape]
    return itertools.product(*cuts)


class Watched:
    """An array that notes what was read of it."""

    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.read = array, array.shape, 0

    def __getitem__(self, box):
        found = self.array[box]
        self.read += found.size
        return found


@pytest.mark.parametrize("name", TURNS)
def test_every_box_is_that_of_the_whole(name):
    turn, pattern, shape = TURNS[name]
    theirs = np.random.default_rng(0).normal(size=turn.theirs(shape))
    sizes = {axis: 3 for axis in "h" if axis in pattern} | ({"c": 2} if name == "three" else {})
    ours = einops.rearrange(theirs, pattern, **sizes)
    assert ours.shape == shape
    np.testing.assert_array_equal(turn.outwards(ours), theirs)
    assert turn.outwards(ours).flags.c_contiguous
    for box in boxes(shape):
        watched = Watched(theirs)
        np.testing.assert_array_equal(turn.read(watched, box, shape, np.float64), ours[box])
        if name != "three" and box[-1 if name == "per_head_vector" else 0].stop:
            inner = {"per_head_out": 2, "per_head_in": 1, "per_head_vector": 1}.get(name)
            grown = [slice(0, n) if d == inner else s for d, (s, n) in enumerate(zip(box, shape, strict=True))]
            assert watched.read == ours[tuple(grown)].size, "more was read than the box and its whole heads"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("rows", "padded"), [(5, 5), (5, 8), (8, 5)])
def test_rows_of_the_vocabulary_are_padded_or_cut(rows, padded, dtype):
    turn = vocab_rows(rows, padded)
    theirs = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float16)
    ours = np.zeros((padded, 4), dtype)
    ours[: min(rows, padded)] = theirs[:padded]
    assert turn.theirs(ours.shape) == theirs.shape
    np.testing.assert_array_equal(turn.outwards(ours), theirs[:padded].astype(dtype))
    for box in boxes(ours.shape):
        found = turn.read(theirs, box, ours.shape, dtype)
        np.testing.assert_array_equal(found, ours[box])
        assert found.dtype == dtype


def test_parts_of_one_tensor():
    """Query, key and value as rows of one matrix: two query heads, one of key and value, of two channels each."""
    fused = np.random.default_rng(0).normal(size=(8, 6))
    rules = [
        Rule("qkv", per_head_out(2), Part(0, 4, 8)),
        Rule("qkv", per_head_out(1), Part(4, 6, 8)),
        Rule("qkv", per_head_out(1), Part(6, 8, 8)),
    ]
    shapes = [(6, 2, 2), (6, 1, 2), (6, 1, 2)]
    for rule, shape in zip(rules, shapes, strict=True):
        assert rule.theirs(shape) == fused.shape
        wanted = einops.rearrange(fused[rule.part.start : rule.part.stop], "(h c) d -> d h c", c=2)
        for box in boxes(shape):
            np.testing.assert_array_equal(rule.read(fused, box, shape, np.float64), wanted[box])


def test_our_own_mistakes_are_assertions():
    for wrong in (
        lambda: per_head_out(3).theirs((8, 2, 4)),
        lambda: linear().theirs((8, 2, 4)),
        lambda: Part(4, 4, 8),
        lambda: Part(4, 9, 8),
        lambda: Rule("x", same(), Part(0, 3, 8)).theirs((4,)),
    ):
        with pytest.raises(AssertionError):
            wrong()
