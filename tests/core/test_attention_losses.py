"""Distances of attention maps and relations: against loops over documents in numpy, under layouts and mappers."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import inside
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inside import Sizes

from spmd_distill.errors import UserError
from spmd_distill.features import AbstractFeatureLoss, AttentionMaps, MiniLMRelations, blocks
from spmd_distill.features.minilm import RELATIONS


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


LOSSES = {
    "kl, mean": AttentionMaps(),
    "mse, mean": AttentionMaps("mse"),
    "kl, matched": AttentionMaps(heads="matched"),
    "mse, matched": AttentionMaps("mse", "matched"),
    "values": MiniLMRelations(),
    "all, 2 heads": MiniLMRelations("queries_keys_values", 2),
}
SMALL = Sizes(heads=6, kv_heads=6, head_dim=4)
PAIRS = {
    "9/3 9/3": (Sizes(heads=9, kv_heads=3, head_dim=4), Sizes(heads=9, kv_heads=3, head_dim=8)),
    "8/4 8/4": (Sizes(attention_scale=0.4), Sizes(attention_softcap=2.0)),
    "4/2 8/8": (Sizes(heads=4, kv_heads=2), Sizes(heads=8, kv_heads=8, head_dim=4)),
    "6/6 9/3": (replace(SMALL, attention_softcap=1.5), Sizes(heads=9, kv_heads=3, head_dim=8)),
}
"""Heads and key/value heads of the student and of the teacher."""


@dataclass(frozen=True)
class Several(AbstractFeatureLoss):
    """A weighted sum of losses: one program instead of many."""

    losses: tuple[AbstractFeatureLoss, ...]

    @property
    def taps(self):
        return tuple(dict.fromkeys(tap for loss in self.losses for tap in loss.taps))

    def __call__(self, student, teacher, tokens, params):
        return sum((i + 1) * loss(student, teacher, tokens, params) for i, loss in enumerate(self.losses))


# The oracle: one document, one token, one head after the other; complex numbers pass through it


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.real.max())
    return e / e.sum()


def attention(taps: dict[str, np.ndarray], sizes: Sizes, row: int, i: int, seen: list[int]) -> np.ndarray:
    """[heads, seen]"""
    maps = []
    for h in range(sizes.heads):
        keys = taps["keys"][row, seen, h // (sizes.heads // sizes.kv_heads)]
        z = keys @ taps["queries"][row, i, h] * (sizes.attention_scale or sizes.head_dim**-0.5)
        cap = sizes.attention_softcap
        maps.append(softmax(cap * np.tanh(z / cap) if cap else z))
    return np.stack(maps)


def relations(x: np.ndarray, heads: int, row: int, i: int, seen: list[int]) -> np.ndarray:
    """[relation heads, seen]"""
    x = x[row].reshape(x.shape[1], heads, -1)
    return np.stack([softmax(x[seen, r] @ x[i, r] / np.sqrt(x.shape[-1])) for r in range(heads)])


def distance(divergence: str, ours: np.ndarray, theirs: np.ndarray) -> Any:
    """Of [n, seen]: the mean over n."""
    each = theirs * (np.log(theirs) - np.log(ours)) if divergence == "kl" else (theirs - ours) ** 2
    return each.sum() / len(each)


def of_token(loss: Any, ours: Any, theirs: Any, sizes: tuple[Sizes, Sizes], row: int, i: int, seen: list[int]) -> Any:
    if isinstance(loss, AttentionMaps):
        a, b = attention(ours, sizes[0], row, i, seen), attention(theirs, sizes[1], row, i, seen)
        if loss.heads == "mean":
            return distance(loss.divergence, a.mean(0, keepdims=True), b.mean(0, keepdims=True))
        return distance(loss.divergence, a, b[[h * len(b) // len(a) for h in range(len(a))]])
    found = 0
    for tap in RELATIONS[loss.relations]:
        counts = [s.heads if tap == "queries" else s.kv_heads for s in sizes]
        heads = loss.relation_heads or int(np.gcd(*counts))
        found += distance("kl", *(relations(x[tap], heads, row, i, seen) for x in (ours, theirs)))
    return found / len(RELATIONS[loss.relations])


def oracle(loss: Any, given: inside.Arrays, window: int | None = None, ours: Any = None) -> Any:
    if isinstance(loss, Several):
        return sum((i + 1) * oracle(x, given, window, ours) for i, x in enumerate(loss.losses))
    total = 0
    for row, i in np.argwhere(given.valid):
        near = range(0 if window is None or isinstance(loss, MiniLMRelations) else max(0, i - window + 1), i + 1)
        seen = [j for j in near if given.segments[row, j] == given.segments[row, i]]
        total += of_token(loss, ours or given.student, given.teacher, given.sizes, row, i, seen)
    return total


def agree(loss: Any, given: inside.Arrays, found: inside.Found, window: int | None = None, rtol: float = 1e-9) -> None:
    """The value, and the derivatives along random directions by complex steps."""
    np.testing.assert_allclose(found.value, oracle(loss, given, window), rtol=rtol)
    r = np.random.default_rng(1)
    for tap, x in given.student.items():
        direction = r.normal(size=x.shape)
        moved = given.student | {tap: x + 1e-30j * direction}
        wanted = oracle(loss, given, window, moved).imag / 1e-30
        assert abs(wanted) > 1e-3
        np.testing.assert_allclose(np.sum(found.taps[tap] * direction), wanted, rtol=rtol, err_msg=tap)


GROUPS = {
    "kl of means, mse of heads": Several((LOSSES["kl, mean"], LOSSES["mse, matched"])),
    "relations": Several((LOSSES["values"], LOSSES["all, 2 heads"])),
}
ON = {"4 shards": ("shard_map", "dp2_tp4"), "8 shards": ("shard_map", "tp8")}


@pytest.mark.parametrize("loss", LOSSES)
def test_is_the_formula(loss):
    given = inside.arrays(LOSSES[loss], *PAIRS["8/4 8/4"])
    agree(LOSSES[loss], given, inside.found(LOSSES[loss], given, windows=(5, 3)), window=3)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("on", ON)
def test_heads_are_cut_in_any_way(on, pair, group):
    given = inside.arrays(GROUPS[group], *PAIRS[pair])
    agree(GROUPS[group], given, inside.found(GROUPS[group], given, *ON[on]))


def test_an_empty_place_beside_a_head_weighs_nothing():
    """On two shards three heads leave one empty, where the teacher has its sixth: nothing moves, nothing is added."""
    loss = LOSSES["kl, matched"]
    given = inside.arrays(loss, Sizes(heads=3, kv_heads=3, head_dim=4), SMALL)
    agree(loss, given, inside.found(loss, given, "shard_map", "dp4_tp2"))


@pytest.mark.parametrize("loss", GROUPS)
@pytest.mark.parametrize(("mapper", "layout"), [("vmap", "tp8"), ("pmap", "sp2_tp4"), ("shard_map", "fsdp2_sp4")])
def test_under_every_mapper(mapper, layout, loss):
    it = GROUPS[loss]
    given = inside.arrays(it, *PAIRS["6/6 9/3"])
    agree(it, given, inside.found(it, given, mapper, layout, windows=(None, 4)), window=4)


@pytest.mark.parametrize("loss", [*GROUPS, "kl, matched"])
def test_blocks_make_no_difference(loss, monkeypatch):
    """Blocks of two tokens a shard, the last one beyond the row, in four parts."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4000)
    it = (GROUPS | LOSSES)[loss]
    given = inside.arrays(it, *PAIRS["9/3 9/3"])

    def cut(x: Any) -> Any:
        return jax.tree.map(lambda x: x[:, :13], x)

    given = given.of(
        student=cut(given.student), teacher=cut(given.teacher), segments=cut(given.segments), valid=cut(given.valid)
    )
    agree(it, given, inside.found(it, given, "shard_map", "dp4_tp2", windows=(6, 6)), window=6)


# What must not matter

ALL = Several(tuple(LOSSES.values()))


@functools.cache
def everything(dtype: str = "float64") -> tuple[inside.Arrays, Any]:
    capped = replace(SMALL, attention_softcap=500.0)
    given = inside.arrays(ALL, capped, capped, dtype=np.dtype(dtype))
    return given, inside.compiled(ALL, given, "vmap", "single")


def run(program: Any, given: inside.Arrays) -> inside.Found:
    value, taps, params = program(given.student, given.teacher, given.segments, given.valid, {})
    return inside.Found(float(value), jax.device_get(taps), params)


def test_what_padding_holds_changes_no_bit():
    given, program = everything()
    padding = given.segments == 0

    def filled(taps: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {k: np.where(padding[:, :, None, None], 1e308 * np.sign(x), x) for k, x in taps.items()}

    before, after = (
        run(program, x) for x in (given, given.of(student=filled(given.student), teacher=filled(given.teacher)))
    )
    assert before.value == after.value
    for tap, x in before.taps.items():
        np.testing.assert_array_equal(x, after.taps[tap])
        assert not x[padding].any()


def test_queries_of_tokens_that_do_not_count_change_no_bit():
    loss = Several((LOSSES["kl, mean"], LOSSES["mse, matched"]))
    given = inside.arrays(loss, *PAIRS["8/4 8/4"])
    program = inside.compiled(loss, given, "vmap", "single")
    off = ~given.valid[:, :, None, None]
    other = {k: np.where(off & (k == "queries"), 1e200 * np.sign(x), x) for k, x in given.student.items()}
    before, after = run(program, given), run(program, given.of(student=other))
    assert before.value == after.value
    for tap, x in before.taps.items():
        np.testing.assert_array_equal(x, after.taps[tap])


def test_packing_and_batches_make_no_difference():
    """Every document in a row of its own, somewhere in it, gives the same sum, and so do half the documents twice."""
    given, program = everything()
    before = run(program, given)
    documents = [
        (r, np.flatnonzero(given.segments[r] == s)) for r in range(8) for s in range(1, given.segments[r].max() + 1)
    ]
    halves, grads = [], {k: np.zeros_like(x) for k, x in given.student.items()}
    for half in (documents[:6], documents[6:]):
        places = [(row, old, (row + np.arange(len(old)) + 1) % 16 if len(old) < 16 - row else old) for row, old in half]
        places = [(row, old, np.sort(new) if np.ptp(new) == len(old) - 1 else old) for row, old, new in places]

        def moved(x: np.ndarray, fill: Any = 0, places: Any = places) -> np.ndarray:
            out = np.full((8, *x.shape[1:]), fill, x.dtype)
            for i, (row, old, new) in enumerate(places):
                out[i, new] = x[row, old]
            return out

        segments = (moved(given.segments) > 0) * np.arange(3, 11, dtype=np.int32)[:, None]
        taps = [{k: moved(x) for k, x in t.items()} for t in (given.student, given.teacher)]
        found = run(program, given.of(student=taps[0], teacher=taps[1], segments=segments, valid=moved(given.valid)))
        halves.append(found.value)
        for i, (row, old, new) in enumerate(places):
            for tap, x in grads.items():
                x[row, old] = found.taps[tap][i, new]
    assert len(documents) <= 16
    np.testing.assert_allclose(sum(halves), before.value, rtol=1e-12)
    for tap, x in grads.items():
        np.testing.assert_allclose(x, before.taps[tap], rtol=1e-9, atol=1e-15)


def test_a_tokens_loss_knows_itself_and_what_stands_before_it_in_its_document():
    given, program = everything()
    for row, i in [(0, 0), (0, 4), (0, 8), (0, 9), (0, 12), (2, 5), (2, 7), (7, 15)]:
        valid = np.zeros_like(given.valid)
        valid[row, i] = True
        found = run(program, given.of(valid=valid))
        for x in found.taps.values():
            touched = np.argwhere(x.any((2, 3))).tolist()
            assert all(r == row and given.segments[r, j] == given.segments[row, i] and j <= i for r, j in touched)
        alone = i == 0 or given.segments[row, i - 1] != given.segments[row, i]
        assert (found.value == 0) == alone
        assert alone or found.taps["keys"][row, i - 1].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("zero", ["student", "teacher", "both", "huge"])
def test_finite_for_zeros_and_for_maps_of_a_single_token(zero, dtype):
    given, program = everything(dtype)
    factor = {"student": (0, 1), "teacher": (1, 0), "both": (0, 0), "huge": (300, 200)}[zero]
    taps = [
        {k: (f * x).astype(dtype) for k, x in t.items()}
        for f, t in zip(factor, (given.student, given.teacher), strict=True)
    ]
    found = run(program, given.of(student=taps[0], teacher=taps[1]))
    assert np.isfinite(found.value) and (abs(found.value) < 1e-12 if zero == "both" else found.value > 0)
    assert all(np.isfinite(x).all() for x in found.taps.values())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_between_a_model_and_itself(dtype):
    given, program = everything(dtype)
    found = run(program, given.of(teacher=given.student))
    assert found.value == 0
    assert all(np.abs(x).max() < 10 * np.finfo(dtype).eps for x in found.taps.values())


def test_inputs_in_bfloat16_are_computed_in_float32():
    rounded = inside.arrays(ALL, *PAIRS["4/2 8/8"], dtype=jnp.bfloat16)
    exact = rounded.of(
        **{
            side: {k: x.astype(np.float64) for k, x in getattr(rounded, side).items()}
            for side in ("student", "teacher")
        }
    )
    np.testing.assert_allclose(inside.found(ALL, rounded).value, oracle(ALL, exact), rtol=2e-6)


# What is alive, and what is sent: read off programs that are never run

BYTES = 2**18
"""Of a block, here; the maps of a row of 1024 tokens would take eight to eighteen MiB on a shard."""


def traced(loss: AbstractFeatureLoss, pair: str, length: int, layout: str = "dp2_tp4") -> Any:
    small = inside.arrays(loss, *PAIRS[pair], dtype=np.float32)

    def long(x: np.ndarray) -> Any:
        return jax.ShapeDtypeStruct((2, length, *x.shape[2:]), x.dtype)

    taps = (jax.tree.map(long, side) for side in (small.student, small.teacher))
    program = inside.compiled(loss, small, "shard_map", layout)
    return program.trace(*taps, long(small.segments), long(small.valid), {})


def equations(jaxpr: Any, loops: int = 0) -> Iterator[tuple[Any, int]]:
    """Every equation, and in how many loops it stands."""
    for equation in jaxpr.eqns:
        yield equation, loops
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, loops + (equation.primitive.name in ("scan", "while")))


KINDS = {"all_to_all": "exchanged", "all_gather": "gathered", "reduce_scatter": "scattered"}
NOTHING: dict[str, int] = {}
SENT = {
    ("kl, mean", "8/4 8/4", "dp2_tp4"): {"exchanged": 3, "gathered": 2, "scattered": 1},
    ("kl, matched", "8/4 8/4", "tp8"): NOTHING,
    ("kl, matched", "9/3 9/3", "dp2_tp4"): NOTHING,
    ("kl, matched", "6/6 9/3", "dp2_tp4"): NOTHING,
    ("kl, matched", "6/6 9/3", "tp8"): {"exchanged": 3, "gathered": 2, "scattered": 1},
    ("values", "8/4 8/4", "dp2_tp4"): NOTHING,
    ("values", "9/3 9/3", "dp2_tp4"): {"gathered": 2, "scattered": 1},
}
"""Forward of both models and backward of the student, in heads of one layer."""


@pytest.mark.parametrize(("loss", "pair", "layout"), SENT)
def test_heads_travel_where_they_must_and_maps_never(loss, pair, layout, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BYTES)
    length = 1024
    program = traced(LOSSES[loss], pair, length, layout).jaxpr.jaxpr
    sent: Counter[str] = Counter()
    most = (2 if layout == "tp8" else 1) * length * 12 * 8  # entries of all heads of the rows, and of empty places
    for equation, loops in equations(program):
        if kind := KINDS.get(equation.primitive.name.removesuffix("_invariant")):
            assert not loops
            sent[kind] += 1
            assert all(v.aval.size <= most for v in equation.outvars)
        elif equation.primitive.name.startswith("psum"):
            # The sum; the gradients of the taps, which the harness holds whole.
            assert not loops and all(v.aval.shape == () or v.aval.shape[1:2] == (length,) for v in equation.outvars)
        for v in equation.outvars:
            size = getattr(v.aval, "size", 0)
            assert size * 4 <= max(BYTES, 4 * most), v.aval
    assert sent == SENT[loss, pair, layout]


@pytest.mark.parametrize(("loss", "pair"), [("kl, mean", "8/4 8/4"), ("values", "9/3 9/3")])
def test_memory_grows_with_the_length_alone(loss, pair, monkeypatch):
    """Four times the length: the arrays of tokens, and no more than those, are four times as large."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BYTES)
    short, long = (
        traced(LOSSES[loss], pair, n).lower().compile().memory_analysis().temp_size_in_bytes for n in (512, 2048)
    )
    a_token = 4 * sum(8 * (s.heads + s.kv_heads) for s in PAIRS[pair])
    assert long - short < 8 * a_token * (2048 - 512) + 2 * BYTES < 2048 * 2048 * 4


# Errors


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AttentionMaps("js"), "AttentionMaps: divergence is 'js'; expected one of kl, mse"),
        (lambda: AttentionMaps(heads="all"), "AttentionMaps: heads is 'all'; expected one of mean, matched"),
        (lambda: MiniLMRelations("hidden"), "MiniLMRelations: relations is 'hidden'; expected one of values"),
        (lambda: MiniLMRelations(relation_heads=0), "relation_heads is 0; it must be at least 1, or null"),
        (
            lambda: MiniLMRelations(relation_heads=8).check(*PAIRS["4/2 8/8"]),
            r"relation_heads is 8, but the student's values have 12 channels a token and the teacher's 32; it must "
            r"divide both: take a divisor of 4, or null for 2\.",
        ),
    ],
)
def test_mistakes_are_named(make, says):
    with pytest.raises(UserError, match=says):
        make()
