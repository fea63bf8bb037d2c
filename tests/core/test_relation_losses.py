"""Losses between relations of tokens, against the papers' formulas written as plain loops in NumPy.

Oracles are float64, their gradients a complex step. All losses of a program share it; its weights choose one at a time.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import inside
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inside import Arrays, Found, Sizes, Together
from test_compiled import collectives_of, equations

from spmd_distill.errors import UserError
from spmd_distill.features import (
    FEATURES,
    CenteredKernelAlignment,
    Contrastive,
    RelationalAngle,
    RelationalDistance,
    TokenSimilarity,
    blocks,
    linear_cka,
)
from spmd_distill.sharding import MeshLayout

F64, F32, BF16 = np.float64, np.float32, jnp.bfloat16
SIZES = Sizes(width=24), Sizes(width=13)
"""Widths that no number of shards divides evenly are among them."""
LOSSES = {
    "similarity": TokenSimilarity(),
    "distance": RelationalDistance(),
    "distance, mostly a line": RelationalDistance(delta=0.1),
    "angle": RelationalAngle(neighbours=3, delta=0.5),
    "angle of all triples": RelationalAngle(neighbours=15),
    "cka": CenteredKernelAlignment(),
    "contrastive": Contrastive(temperature=0.3),
    "contrastive, one matrix": Contrastive(projection="shared", init="normal"),
}
SOME = ("similarity", "distance", "angle", "cka", "contrastive")
"""Those that are run in every place: one of each class."""
EXACT = [name for name in LOSSES if "contrastive" not in name]
"""Those that are 0 where the two models are the same."""
PLACES = [
    ("shard_map", "dp2_tp4"), ("shard_map", "fsdp2_sp4"), ("shard_map", "dp8"), ("pmap", "sp2_tp4"),
    ("pmap", "fsdp2_tp4"), ("vmap", "fsdp2_sp4"), ("vmap", "tp8"),
]  # fmt: skip

one_by_one = pytest.mark.parametrize("name", LOSSES)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    """Three tokens a block on one device, and one a shard elsewhere: the last block is not full. Fewer parts: each is
    compiled for itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 3 * 8 * 2 * 16 * 8)
        patch.setattr(blocks, "PARTS", 2)
        yield


# ---------------------------------------------------------------------------------------------------------------------
# The oracles: what a document costs, each of its tokens if the loss is one of tokens


def cosine(a: np.ndarray, b: np.ndarray) -> Any:
    lengths = np.sqrt(a @ a) * np.sqrt(b @ b)
    return a @ b / lengths if lengths != 0 else 0.0


def huber(error: Any, delta: float) -> Any:
    error = -error if error.real < 0 else error
    return error**2 / 2 if error.real <= delta else delta * (error - delta / 2)


def similarity(loss: TokenSimilarity, s: np.ndarray, t: np.ndarray, places: list[int]) -> list[Any]:
    costs = [[(cosine(s[i], s[j]) - cosine(t[i], t[j])) ** 2 for j in range(i)] for i in range(len(s))]
    return [sum(c) / len(c) if c else 0.0 for c in costs]


def distance(loss: RelationalDistance, s: np.ndarray, t: np.ndarray, places: list[int]) -> list[Any]:
    pairs = list(itertools.permutations(range(len(s)), 2))
    if not pairs:
        return [0.0]
    both = []
    for x in (s, t):
        lengths = [np.sqrt((x[i] - x[j]) @ (x[i] - x[j])) for i, j in pairs]
        both.append([length / (sum(lengths) / len(pairs)) for length in lengths])
    return [len(s) * sum(huber(a - b, loss.delta) for a, b in zip(*both, strict=True)) / len(pairs)]


def angle(loss: RelationalAngle, s: np.ndarray, t: np.ndarray, places: list[int]) -> list[Any]:
    triples = [
        (i, j, k)
        for i, j, k in itertools.permutations(range(len(s)), 3)
        if abs(places[i] - places[j]) <= loss.neighbours and abs(places[k] - places[j]) <= loss.neighbours
    ]
    costs = [
        huber(cosine(s[i] - s[j], s[k] - s[j]) - cosine(t[i] - t[j], t[k] - t[j]), loss.delta) for i, j, k in triples
    ]
    return [len(s) * sum(costs) / len(costs)] if costs else [0.0]


def cka_by_kernels(x: np.ndarray, y: np.ndarray) -> Any:
    """Equations 2 and 3 of Kornblith et al. with the centring matrix H written out."""
    h = np.eye(len(x)) - 1 / len(x)
    k, l = x @ x.T, y @ y.T  # noqa: E741

    def hsic(a, b):
        return np.trace(a @ h @ b @ h) / (len(x) - 1) ** 2

    return hsic(k, l) / np.sqrt(hsic(k, k) * hsic(l, l))


def cka(loss: CenteredKernelAlignment, s: np.ndarray, t: np.ndarray, places: list[int]) -> list[Any]:
    return [len(s) * (1 - cka_by_kernels(s, t))] if len(s) > 1 else [0.0]


def contrastive(
    loss: Contrastive, s: np.ndarray, t: np.ndarray, places: list[int], params: Mapping[str, np.ndarray] | None = None
) -> list[Any]:
    s = s if params is None else s @ params["projection"].reshape(s.shape[1], t.shape[1])
    found = []
    for i in range(len(s)):
        scores = [np.exp(cosine(s[i], t[j]) / loss.temperature) for j in range(i + 1)]
        found.append(-np.log(scores[i] / sum(scores)))
    return found


ORACLES: dict[type, Any] = {
    TokenSimilarity: similarity,
    RelationalDistance: distance,
    RelationalAngle: angle,
    CenteredKernelAlignment: cka,
    Contrastive: contrastive,
}


def documents(given: Arrays) -> Iterator[tuple[int, list[int]]]:
    """Row and valid tokens of every document that has some."""
    for row, segments in enumerate(given.segments):
        for number in sorted(set(segments.tolist()) - {0}):
            places = np.flatnonzero((segments == number) & given.valid[row]).tolist()
            if places:
                yield row, places


def costs(name: str, given: Arrays, params: Mapping[str, np.ndarray]) -> list[list[Any]]:
    """Of every document."""
    (s,), (t,), loss = given.student.values(), given.teacher.values(), LOSSES[name]
    own = {"params": params} if params else {}
    return [ORACLES[type(loss)](loss, s[row, at], t[row, at], at, **own) for row, at in documents(given)]


def oracle(name: str, given: Arrays, params: Mapping[str, np.ndarray]) -> Any:
    return sum(sum(document) for document in costs(name, given, params))


# ---------------------------------------------------------------------------------------------------------------------
# What the library finds


def problem(seed: int = 0, dtype: Any = F64, scale: float = 1.0) -> Arrays:
    return inside.arrays(LOSSES["similarity"], *SIZES, seed, dtype, scale)


@cache
def program(losses: tuple[str, ...], mapper: str, layout: str, dtype: Any) -> Any:
    return inside.compiled(Together(tuple(LOSSES[n] for n in losses)), problem(dtype=dtype), mapper, layout)


@cache
def born(losses: tuple[str, ...] = tuple(LOSSES)) -> dict[str, np.ndarray]:
    """The parameters of a program."""
    return {k: np.asarray(x, F64) for k, x in inside.initial(Together(tuple(LOSSES[n] for n in losses)), SIZES).items()}


def own(name: str, params: Mapping[str, np.ndarray], losses: tuple[str, ...] = tuple(LOSSES)) -> dict[str, np.ndarray]:
    """Of a program's parameters, those of a loss."""
    start = f"{losses.index(name)}_"
    return {k.removeprefix(start): x for k, x in params.items() if k.startswith(start)}


def found(
    name: str, given: Arrays, mapper: str = "vmap", layout: str = "single", losses: tuple[str, ...] = tuple(LOSSES)
) -> Found:
    """One loss' value, gradients by the student's hidden states, and by its own parameters."""
    dtype = given.student["block_output"].dtype.type
    params = {k: x.astype(dtype) for k, x in born(losses).items()}
    params["weights"] = np.eye(len(losses), dtype=dtype)[losses.index(name)]
    with jax.enable_x64(True) if dtype is F64 else contextlib.nullcontext():
        run = program(losses, mapper, layout, dtype)
        value, taps, grads = jax.device_get(run(given.student, given.teacher, given.segments, given.valid, params))
    return Found(float(value), taps, own(name, grads, losses))


def grad(is_: Found) -> np.ndarray:
    return np.asarray(is_.taps["block_output"], F64)


def close(a: Any, b: Any, tolerance: float) -> None:
    a, b = np.asarray(a, F64), np.asarray(b, F64)
    assert np.isfinite(a).all() and a.shape == b.shape
    assert np.abs(a - b).max(initial=0) <= tolerance * np.abs(b).max(initial=0), np.abs(a - b).max()


def replaced(given: Arrays, where: np.ndarray, student: Any = None, teacher: Any = None) -> Arrays:
    """With other features of the tokens ``where``."""

    def one(taps, value):
        if value is None:
            return taps
        return {k: np.where(where[..., None], np.asarray(value, x.dtype), x) for k, x in taps.items()}

    return given.of(student=one(given.student, student), teacher=one(given.teacher, teacher))


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients


def test_every_loss_is_here():
    assert set(ORACLES) == {type(loss) for loss in LOSSES.values()} <= set(FEATURES.values())


@one_by_one
def test_one_device_equals_the_oracle(name):
    """The value, and the derivative along random directions of the hidden states and the parameters."""
    given, r, params = problem(), np.random.default_rng(1), own(name, born())
    is_ = found(name, given)
    close(is_.value, oracle(name, given, params), 1e-12)
    assert not grad(is_)[~given.valid].any()
    for _ in range(2):
        step = {k: r.normal(size=x.shape) for k, x in params.items()}
        tap = {k: r.normal(size=x.shape) for k, x in given.student.items()}
        moved = given.of(student={k: x + 1e-40j * tap[k] for k, x in given.student.items()})
        slope = oracle(name, moved, {k: x + 1e-40j * step[k] for k, x in params.items()}).imag / 1e-40
        parts = [(is_.taps[k] * x).ravel() for k, x in tap.items()]
        parts = np.concatenate(parts + [(is_.params[k] * x).ravel() for k, x in step.items()])
        assert abs(parts.sum() - slope) <= 1e-11 * np.abs(parts).sum() and abs(slope) > 1e-3
    assert set(is_.params) == set(params) and all(x.any() for x in is_.params.values())


@pytest.mark.parametrize(("mapper", "layout"), PLACES)
def test_every_place_equals_one_device(mapper, layout):
    given = problem(seed=2)
    for name in SOME:
        wanted, is_ = found(name, given), found(name, given, mapper, layout, SOME)
        close(is_.value, wanted.value, 1e-12)
        close(grad(is_), grad(wanted), 1e-11)
        for k, x in wanted.params.items():
            close(is_.params[k], x, 1e-11)


@one_by_one
def test_a_token_that_does_not_count_moves_nothing(name):
    given, r = problem(), np.random.default_rng(3)
    other = replaced(given, ~given.valid, 1e300 * r.normal(size=24), 1e300 * r.normal(size=13))
    wanted, is_ = found(name, given), found(name, other)
    assert is_.value == wanted.value
    np.testing.assert_array_equal(grad(is_), grad(wanted))


@one_by_one
def test_documents_cost_the_same_wherever_they_lie(name):
    """Each in a row of its own and elsewhere in it; and one half of the rows at a time."""
    given = problem()
    whole, parts = found(name, given), []
    for half in (0, 1):
        mine = np.arange(8)[:, None] % 2 == half
        parts.append(found(name, given.of(segments=np.where(mine, given.segments, 0), valid=given.valid & mine)))
    close(sum(p.value for p in parts), whole.value, 1e-12)
    close(sum(grad(p) for p in parts), grad(whole), 1e-12)

    moved, gradient, value = [], np.zeros_like(grad(whole)), 0.0
    for row, segments in enumerate(given.segments):
        for number in sorted(set(segments.tolist()) - {0}):
            moved.append((row, np.flatnonzero(segments == number)))
    for first in range(0, len(moved), 8):
        rows = moved[first : first + 8]
        other = {k: np.zeros_like(x) for k, x in (given.student | {"teacher": given.teacher["block_output"]}).items()}
        segments, valid = np.zeros_like(given.segments), np.zeros_like(given.valid)
        for new, (row, at) in enumerate(rows):
            to = at - at[0] + (16 - len(at)) // 2
            other["block_output"][new, to] = given.student["block_output"][row, at]
            other["teacher"][new, to] = given.teacher["block_output"][row, at]
            segments[new, to], valid[new, to] = 3, given.valid[row, at]
        teacher = {"block_output": other.pop("teacher")}
        is_ = found(name, given.of(student=other, teacher=teacher, segments=segments, valid=valid))
        value += is_.value
        for new, (row, at) in enumerate(rows):
            gradient[row, at] += grad(is_)[new, at - at[0] + (16 - len(at)) // 2]
    close(value, whole.value, 1e-12)
    close(gradient, grad(whole), 1e-11)


@one_by_one
def test_a_document_moves_no_other(name):
    given = problem()
    first = np.zeros_like(given.valid)
    first[0, :9] = True
    one = found(name, given)
    two = found(name, replaced(given, first, np.random.default_rng(4).normal(size=24) * given.student["block_output"]))
    assert one.value != two.value
    np.testing.assert_array_equal(grad(one)[~first], grad(two)[~first])


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.unit == "token"])
def test_what_follows_a_token_does_not_move_its_loss(name):
    """A row that ends early costs what its tokens cost in the whole row."""
    given = problem()
    given = given.of(valid=given.valid & (np.arange(8) == 1)[:, None])
    (tokens,) = costs(name, given, own(name, born()))
    places = np.flatnonzero(given.valid[1])
    for end in (3, 8, 15):
        early = np.where(np.arange(16) < end, given.segments, 0)
        is_ = found(name, given.of(segments=early, valid=given.valid & (early > 0)))
        close(is_.value, sum(c for c, at in zip(tokens, places, strict=True) if at < end), 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Corners


@one_by_one
@pytest.mark.parametrize("dtype", [F64, F32])
def test_corners_are_finite(name, dtype):
    given = problem(dtype=dtype)
    everything, some = np.ones_like(given.valid), np.zeros_like(given.valid)
    some[:, 2:5] = True
    for where, student, teacher in [
        (everything, 0, None), (everything, None, 0), (everything, 0, 0), (everything, 1, 2), (some, 0, None),
        (some, None, 0), (some, 0, 0), (some, 0.3, 0.7), (everything, np.arange(24) / 7, None),
        (everything, np.arange(24) / 7, np.arange(13) / 11),
    ]:  # fmt: skip
        is_ = found(name, replaced(given, where, student, teacher))
        assert math.isfinite(is_.value) and np.isfinite(grad(is_)).all()
        assert np.abs(grad(is_)).max() < 100 and all(np.isfinite(x).all() for x in is_.params.values())
        if where is everything and student is not None and LOSSES[name].unit == "document":
            assert not grad(is_).any()
    for scale in (1e-30, 1e30):
        is_ = found(name, problem(dtype=dtype, scale=scale))
        assert math.isfinite(is_.value) and np.isfinite(grad(is_)).all()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [F64, F32])
def test_models_that_are_alike_cost_nothing(name, dtype):
    """Channels that are zero may be in any number: they have a part in no relation."""
    given = problem(dtype=dtype)
    student = np.pad(given.teacher["block_output"], [(0, 0), (0, 0), (0, 11)])
    is_, eps = found(name, given.of(student={"block_output": student})), np.finfo(dtype).eps
    assert abs(is_.value) < 100 * eps and np.abs(grad(is_)).max() < 30 * eps


@one_by_one
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_few_bits_are_close_to_float64(name, dtype):
    """Of the same rounded hidden states, which lie around a mean that is large beside their differences."""
    given = problem(dtype=dtype)
    r = np.random.default_rng(5)
    around = {"student": (30 * r.normal(size=24)).astype(dtype), "teacher": (30 * r.normal(size=13)).astype(dtype)}
    given = given.of(**{k: {n: x + around[k] for n, x in getattr(given, k).items()} for k in around})
    exact = given.of(**{k: {n: x.astype(F64) for n, x in getattr(given, k).items()} for k in around})
    is_, wanted = found(name, given), found(name, exact)
    assert is_.value == pytest.approx(wanted.value, rel=2e-4)
    close(grad(is_), grad(wanted), 1e-3 if dtype is F32 else 1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# What is held, and what is sent


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("layout", ["dp2_tp4", "sp2_tp4"])
def test_no_more_than_a_block_is_held_and_nothing_is_gathered(name, layout):
    sizes = Sizes(width=40), Sizes(width=20)
    given = inside.arrays(LOSSES[name], *sizes, dtype=F32)
    params = {k: x.astype(F32) for k, x in inside.initial(LOSSES[name], sizes).items()}
    run = inside.compiled(LOSSES[name], given, "shard_map", layout)
    jaxpr = run.trace(given.student, given.teacher, given.segments, given.valid, params).jaxpr.jaxpr
    inner = [e.params["jaxpr"] for e in equations(jaxpr) if e.primitive.name == "shard_map"]
    (body,) = [getattr(x, "jaxpr", x) for x in inner]
    shapes = {v.aval.shape for e in equations(body) for v in e.outvars}
    assert not [x for x in shapes if x.count(16) > 1], "a matrix of all tokens by all"
    if layout == "sp2_tp4":
        assert not {(4, 16, 40), (4, 16, 20)} & shapes, "hidden states of all tokens, whole"
    made = {e.primitive.name: [v.aval.shape for v in e.outvars] for e in equations(body)}
    assert all(x[1] < 16 for x in made["all_gather"]), "only a block's products are gathered, in the backward pass"
    sent = collectives_of(body, MeshLayout.load(layout).sizes)
    exchanged = 3 if layout == "sp2_tp4" else 2 * bool(params)  # two taps, and one gradient; or what is projected
    assert sent["all-to-all model"] == exchanged and sent["all-reduce data"] == 1 + len(params)
    assert not {kind for kind in sent if "data" in kind} - {"all-reduce data"}


# ---------------------------------------------------------------------------------------------------------------------
# CKA of two arrays


@pytest.mark.parametrize(("n", "widths"), [(5, (7, 3)), (40, (6, 9)), (2, (1, 1))])
def test_linear_cka_is_that_of_the_kernels(n, widths):
    r = np.random.default_rng(n)
    x, y = (r.normal(size=(n, d)) + 3 for d in widths)
    turned, _ = np.linalg.qr(r.normal(size=(widths[0], widths[0])))
    with jax.enable_x64(True):
        assert float(linear_cka(jnp.asarray(x), jnp.asarray(y))) == pytest.approx(cka_by_kernels(x, y), rel=1e-9)
        same = linear_cka(jnp.asarray(x), jnp.asarray(1e9 * x @ turned - 5))
    assert float(same) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_linear_cka_in_few_bits(dtype):
    r = np.random.default_rng(0)
    x = jnp.asarray(1e4 * r.normal(size=(300, 20)) + 1e5, dtype)
    y = jnp.asarray(1e-9 * r.normal(size=(300, 30)), dtype)
    expected = cka_by_kernels(np.asarray(x, F64), np.asarray(y, F64))
    assert float(linear_cka(x, y)) == pytest.approx(expected, rel=1e-4)
    constant = jnp.broadcast_to(x[:1], x.shape)
    assert float(linear_cka(constant, y)) == float(linear_cka(y, 0 * y)) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Settings


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TokenSimilarity(at="queries"), "TokenSimilarity: at is 'queries'; expected one of block_input"),
        (lambda: CenteredKernelAlignment(at="x"), "CenteredKernelAlignment: at is 'x'"),
        (lambda: RelationalDistance(delta=0), "RelationalDistance: delta is 0; expected a number above 0"),
        (lambda: RelationalAngle(delta=math.nan), "RelationalAngle: delta is nan"),
        (lambda: RelationalAngle(neighbours=0), "RelationalAngle: neighbours is 0; expected"),
        (lambda: Contrastive(temperature=0.0), "Contrastive: temperature is 0.0; expected a number above 0"),
        (lambda: Contrastive(projection="auto"), "projection is 'auto'; expected one of per_layer, shared, none"),
        (lambda: Contrastive(init="zeros"), "init is 'zeros'; expected one of orthogonal, normal, identity"),
        (lambda: Contrastive(projection="none").check(*SIZES), "student's hidden states have 24 .* teacher's 13; take"),
    ],
)
def test_wrong_settings_are_named(make, says):
    with pytest.raises(UserError, match=says):
        make()
