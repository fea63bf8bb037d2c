"""Losses between hidden states against a float64 numpy oracle, written from the formulas with loops over documents and
tokens. Its gradient is a complex step. Many losses share one compiled program, whose weights choose one at a time.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import inside
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import Arrays, Found, Sizes

from spmd_distill import features
from spmd_distill.features import DISTANCES, FEATURES, AbstractFeatureLoss, ActivationMaps, HiddenStates
from spmd_distill.features.base import Side, Tokens
from spmd_distill.features.hidden import INITS
from spmd_distill.mappers import MAPPERS
from spmd_distill.models.base import declare

F64, F32, BF16 = np.float64, np.float32, jnp.bfloat16
STUDENT, TEACHER = Sizes(width=16), Sizes(width=24)
DIFFERENT = {
    "mse": HiddenStates(),
    "normalized_mse": HiddenStates("normalized_mse", projection="per_layer", init="normal"),
    "cosine": HiddenStates("cosine", projection="shared"),
    "huber": HiddenStates("huber", delta=0.7, init="identity"),
    "mse, windows that overlap": HiddenStates(pool=5),
    "huber, even windows": HiddenStates("huber", pool=8),
    "maps": ActivationMaps(),
    "maps of a power with a fraction": ActivationMaps(power=1.5),
    "maps of an odd power": ActivationMaps(power=3),
}
"""Losses of models of different widths."""
EQUAL = {f"{name}, as they are": HiddenStates(name) for name in DISTANCES} | {
    "projected all the same": HiddenStates(projection="per_layer"),
    "maps of power 1": ActivationMaps(power=1),
}
GROUPS = {"different": (DIFFERENT, (STUDENT, TEACHER)), "equal": (EQUAL, (TEACHER, TEACHER))}
LOSSES = [(group, name) for group, (losses, _) in GROUPS.items() for name in losses]
PLACES = {
    "different": [
        ("shard_map", "dp2_tp4"), ("shard_map", "sp2_tp4"), ("shard_map", "fsdp2_sp4"), ("shard_map", "tp8"),
        ("pmap", "fsdp2_sp4"), ("pmap", "fsdp2_tp4"), ("vmap", "fsdp2_tp4"), ("vmap", "sp2_tp4"),
    ],
    "equal": [("shard_map", "fsdp2_tp4"), ("shard_map", "dp8"), ("pmap", "sp2_tp4"), ("vmap", "fsdp2_sp4")],
}  # fmt: skip
"""Mapper and layout; with both groups every mapper meets activations that are whole and cut."""


# ---------------------------------------------------------------------------------------------------------------------
# The oracle


def documents(given: Arrays) -> Iterator[list[tuple[int, int]]]:
    """The valid tokens of every document."""
    for row, segments in enumerate(given.segments):
        for number in sorted(set(segments.tolist()) - {0}):
            found = np.flatnonzero((segments == number) & given.valid[row]).tolist()
            if found:
                yield [(row, i) for i in found]


def unit(x: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x) + epsilon**2)


def averages(x: np.ndarray, channels: int) -> np.ndarray:
    edges = [(math.floor(i * len(x) / channels), math.ceil((i + 1) * len(x) / channels)) for i in range(channels)]
    return np.array([x[begin:end].mean() for begin, end in edges])


def distance(name: str, delta: float, s: np.ndarray, t: np.ndarray) -> Any:
    if name == "mse":
        return np.mean((s - t) ** 2)
    if name == "normalized_mse":
        return np.sum((unit(s) - unit(t)) ** 2)
    if name == "cosine":
        return 1 - np.sum(unit(s) * unit(t))
    e = np.where((s - t).real < 0, t - s, s - t)
    return np.mean(np.where(e.real <= delta, e**2 / 2, delta * (e - delta / 2)))


def oracle(loss: Any, given: Arrays, params: Mapping[str, np.ndarray]) -> Any:
    (s,), (t,) = given.student.values(), given.teacher.values()
    total: Any = 0
    for tokens in documents(given):
        if isinstance(loss, ActivationMaps):
            maps = []
            for h in (s, t):
                rows = [h[at] for at in tokens]
                maps.append(unit(np.array([np.mean((x * x) ** (loss.power / 2)) for x in rows]), 0))
            total += len(tokens) * np.sum((maps[0] - maps[1]) ** 2)
            continue
        for at in tokens:
            a, b = s[at], t[at]
            if "projection" in params:
                a = a @ params["projection"].reshape(len(a), len(b))
            if loss.pool:
                a, b = averages(a, loss.pool), averages(b, loss.pool)
            total += distance(loss.distance, loss.delta, a, b)
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Many losses in one program


@dataclass(frozen=True)
class Together(AbstractFeatureLoss):
    """A weighted sum; the weights are a parameter, so that any one of them is a matter of values."""

    losses: tuple[AbstractFeatureLoss, ...]

    @property
    def taps(self):
        return tuple(sorted({tap for loss in self.losses for tap in loss.taps}))

    def declare(self, rngs: nnx.Rngs, student: Any, teacher: Any, pairs: int):
        own = {
            f"{i}_{k}": p
            for i, x in enumerate(self.losses)
            for k, p in x.declare(rngs, student, teacher, pairs).items()
        }
        ones = nnx.initializers.ones
        return own | {"weights": declare(rngs, ones, (len(self.losses),), ("act_embed",), "float32", None)}

    def __call__(self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]):
        total: Any = 0
        for i, loss in enumerate(self.losses):
            own = {k.removeprefix(f"{i}_"): x for k, x in params.items() if k.startswith(f"{i}_")}
            total += params["weights"][i] * loss(student, teacher, tokens, own)
        return total


def together(group: str) -> Together:
    return Together(tuple(GROUPS[group][0].values()))


def problem(group: str, seed: int = 0, dtype: Any = F64, scale: float = 1.0) -> Arrays:
    return inside.arrays(together(group), *GROUPS[group][1], seed, dtype, scale)


def precision(dtype: Any):
    return jax.enable_x64(True) if dtype is F64 else contextlib.nullcontext()


@cache
def program(group: str, mapper: str, layout: str, dtype: Any) -> Any:
    return inside.compiled(together(group), problem(group, dtype=dtype), mapper, layout)


@cache
def born(group: str) -> dict[str, np.ndarray]:
    return {k: np.asarray(x, F64) for k, x in inside.initial(together(group), GROUPS[group][1]).items()}


def own(group: str, name: str, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    start = f"{list(GROUPS[group][0]).index(name)}_"
    return {k.removeprefix(start): x for k, x in params.items() if k.startswith(start)}


def found(group: str, name: str, given: Arrays, mapper: str = "vmap", layout: str = "single") -> Found:
    """One loss' value, gradients by the student's taps, and by its own parameters."""
    dtype = given.student["block_output"].dtype.type
    kept = F32 if dtype is BF16.dtype.type else dtype
    params = {k: x.astype(kept) for k, x in born(group).items()}
    params["weights"] = np.eye(len(GROUPS[group][0]), dtype=kept)[list(GROUPS[group][0]).index(name)]
    with precision(dtype):
        run = program(group, mapper, layout, dtype)
        value, taps, grads = jax.device_get(run(given.student, given.teacher, given.segments, given.valid, params))
    return Found(float(value), taps, own(group, name, grads))


def of(group: str, name: str) -> AbstractFeatureLoss:
    return GROUPS[group][0][name]


def close(a: Any, b: Any, tolerance: float) -> None:
    a, b = np.asarray(a, F64), np.asarray(b, F64)
    assert np.isfinite(a).all() and a.shape == b.shape
    assert np.abs(a - b).max(initial=0) <= tolerance * np.abs(b).max(initial=0), np.abs(a - b).max()


one_by_one = pytest.mark.parametrize(("group", "name"), LOSSES)


# ---------------------------------------------------------------------------------------------------------------------
# What they compute


def test_every_loss_is_here():
    """All that the package exports of this family, every distance, start, and kind of place."""
    losses = [x for losses, _ in GROUPS.values() for x in losses.values()]
    assert {HiddenStates, ActivationMaps} == {type(x) for x in losses} <= set(FEATURES.values())
    assert all(getattr(features, n) in FEATURES.values() for n in features.__all__)
    hidden = [x for x in losses if isinstance(x, HiddenStates)]
    assert {x.distance for x in hidden} == {"mse", "normalized_mse", "cosine", "huber"} <= set(DISTANCES) and {
        x.init for x in hidden
    } == set(INITS)
    assert {m for places in PLACES.values() for m, _ in places} == set(MAPPERS)


@one_by_one
def test_one_device_equals_the_oracle(group, name):
    """The value, and the derivative along random directions of the student's taps and of the parameters."""
    given, r = problem(group), np.random.default_rng(1)
    loss, params, is_ = of(group, name), own(group, name, born(group)), found(group, name, given)
    close(is_.value, oracle(loss, given, params), 1e-13)
    assert not is_.taps["block_output"][~given.valid].any()
    for _ in range(3):
        step = {k: r.normal(size=x.shape) for k, x in params.items()}
        tap = {k: r.normal(size=x.shape) for k, x in given.student.items()}
        moved = given.of(student={k: x + 1e-40j * tap[k] for k, x in given.student.items()})
        slope = oracle(loss, moved, {k: x + 1e-40j * step[k] for k, x in params.items()}).imag / 1e-40
        parts = [(is_.taps[k] * x).ravel() for k, x in tap.items()] + [
            (is_.params[k] * x).ravel() for k, x in step.items()
        ]
        parts = np.concatenate(parts)
        assert abs(parts.sum() - slope) <= 1e-13 * np.abs(parts).sum() and abs(slope) > 1e-3
    assert set(is_.params) == set(params) and all(x.any() for x in is_.params.values())


@pytest.mark.parametrize(("group", "mapper", "layout"), [(g, *x) for g, places in PLACES.items() for x in places])
def test_every_place_equals_one_device(group, mapper, layout):
    given = problem(group, seed=2)
    for name in GROUPS[group][0]:
        wanted, is_ = found(group, name, given), found(group, name, given, mapper, layout)
        close(is_.value, wanted.value, 1e-13)
        close(is_.taps["block_output"], wanted.taps["block_output"], 1e-12)
        for k, x in wanted.params.items():
            close(is_.params[k], x, 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# What they do not depend on


def with_taps(given: Arrays, change: Callable[[str, np.ndarray], np.ndarray], **more: Any) -> Arrays:
    """The taps of both models changed: a function of whose they are and of the array."""
    student = {k: change("student", x) for k, x in given.student.items()}
    return given.of(student=student, teacher={k: change("teacher", x) for k, x in given.teacher.items()}, **more)


@one_by_one
@pytest.mark.parametrize("dtype", [F64, F32])
def test_what_does_not_count_moves_nothing_a_bit(group, name, dtype):
    """Not even the largest numbers, whose sums and squares overflow."""
    given, r = problem(group, 3, dtype), np.random.default_rng(4)

    def spoilt(_: str, x: np.ndarray) -> np.ndarray:
        noise = r.choice([-1, 0.9, 1], x.shape).astype(dtype) * np.finfo(dtype).max
        return np.where(given.valid[..., None], x, noise).astype(dtype)

    before, after = found(group, name, given), found(group, name, with_taps(given, spoilt))
    assert before.value == after.value
    jax.tree.map(np.testing.assert_array_equal, (before.taps, before.params), (after.taps, after.params))


@one_by_one
def test_packing_padding_and_micro_batches_change_nothing(group, name):
    """The same documents one a row, padded to a length that no shards divide, in another order; and in two halves."""
    given, r = problem(group, 5), np.random.default_rng(6)
    whole = found(group, name, given)
    places = [(row, np.flatnonzero(s == n)) for row, s in enumerate(given.segments) for n in set(s.tolist()) - {0}]
    places = [places[i] for i in r.permutation(len(places))]
    begins = r.integers(0, 8, len(places)).tolist()

    def laid(x: np.ndarray) -> np.ndarray:
        new = np.zeros((len(places), 23, *x.shape[2:]), x.dtype)
        for i, (row, columns) in enumerate(places):
            new[i, begins[i] : begins[i] + len(columns)] = x[row, columns]
        return new

    other = with_taps(
        given, lambda _, x: laid(x), segments=laid(np.minimum(given.segments, 1)), valid=laid(given.valid)
    )
    again = found(group, name, other, "shard_map", "dp2_tp4")
    close(again.value, whole.value, 1e-13)
    close(again.taps["block_output"], laid(whole.taps["block_output"]), 1e-12)
    upper = np.arange(8)[:, None] < 3
    halves = [found(group, name, given.of(valid=given.valid & half)) for half in (upper, ~upper)]
    close(halves[0].value + halves[1].value, whole.value, 1e-13)
    for k, x in whole.params.items():
        close(again.params[k], x, 1e-12)
        close(halves[0].params[k] + halves[1].params[k], x, 1e-12)


@one_by_one
def test_one_example_moves_its_own_loss_alone(group, name):
    """A document, or where tokens are alone one token: the gradients of all others stay as they are, to the bit."""
    given = problem(group, 7)
    mine = np.zeros_like(given.valid)
    mine[0] = given.segments[0] == 1
    if of(group, name).unit == "token":
        mine[0, :4] = mine[0, 5:] = False
    assert given.valid[mine].any()
    moved = with_taps(given, lambda _, x: np.where(mine[..., None], 2 - x[::-1], x))
    before, after = found(group, name, given), found(group, name, moved)
    same = (before.taps["block_output"] == after.taps["block_output"]).all(-1)
    assert same[~mine].all() and not same[mine & given.valid].any()
    alone = [found(group, name, x.of(valid=x.valid & mine)).value for x in (given, moved)]
    rest = [found(group, name, x.of(valid=x.valid & ~mine)).value for x in (given, moved)]
    assert rest[0] == rest[1] and alone[0] != alone[1]
    close(after.value - before.value, alone[1] - alone[0], 1e-11)


@one_by_one
@pytest.mark.parametrize("dtype", [F64, F32])
def test_zeros_equals_and_sizes_are_finite(group, name, dtype):
    """Rows of zeros on either side or both, equal rows, very small and large ones, no valid token at all."""
    given = problem(group, 8, dtype)
    cases = {"both": with_taps(given, lambda _, x: 0 * x), "no token": given.of(valid=0 * given.valid > 0)}
    for side in ("student", "teacher"):
        cases[side] = with_taps(given, lambda whose, x, side=side: 0 * x if whose == side else x)
        cases[f"some of the {side}"] = with_taps(
            given, lambda whose, x, side=side: x * (whose != side or given.valid[..., ::-1, None])
        )
    for size in (1e-30, 1e-12, 1e9):
        cases[f"{size}"] = with_taps(given, lambda _, x, size=size: (x * size).astype(dtype))
    if given.sizes[0] == given.sizes[1]:
        cases["equal"] = given.of(teacher=given.student)
    for case, changed in cases.items():
        is_ = found(group, name, changed)
        assert np.isfinite(is_.value), case
        assert all(np.isfinite(x).all() for x in (*is_.taps.values(), *is_.params.values())), case
        expected = {"no token": 0, "both": {"cosine": 1}.get(getattr(of(group, name), "distance", ""), 0)}
        if case in expected:
            assert is_.value == expected[case] * given.valid.sum(), case
        if case == "equal" and "projected" not in name:
            assert abs(is_.value) <= max(4 * np.finfo(dtype).eps, 1e-13) * given.valid.sum()  # EPSILON^2 / |x|^2


@one_by_one
def test_maps_and_directions_do_not_depend_on_the_scale(group, name):
    given = problem(group, 9)
    once, scaled = found(group, name, given), found(group, name, with_taps(given, lambda _, x: 1e100 * x))
    if isinstance(of(group, name), ActivationMaps) or of(group, name).distance in ("normalized_mse", "cosine"):
        close(scaled.value, once.value, 1e-10)
        close(scaled.taps["block_output"] * 1e100, once.taps["block_output"], 1e-10)
    else:
        assert not np.isclose(scaled.value, once.value)


@one_by_one
def test_bfloat16_is_computed_in_float32(group, name):
    """The value as good as float32's; gradients come back in the taps' own type."""
    low = problem(group, 10, BF16, 3.0)
    exactly = with_taps(low, lambda _, x: x.astype(F64))
    params = {k: x.astype(BF16).astype(F64) for k, x in own(group, name, born(group)).items()}
    is_ = found(group, name, low)
    close(is_.value, oracle(of(group, name), exactly, params), 1e-5)
    assert is_.taps["block_output"].dtype == BF16 and all(x.dtype == F32 for x in is_.params.values())
    wanted = found(group, name, exactly)  # of parameters that are not rounded
    close(is_.taps["block_output"], wanted.taps["block_output"], 0.02)
    for k, x in wanted.params.items():
        close(is_.params[k], x, 0.02)
