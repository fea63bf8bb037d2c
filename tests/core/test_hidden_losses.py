"""Losses between hidden states against a float64 numpy oracle, written from the formulas with loops over documents and
tokens. Its gradient is a complex step. Many losses share one compiled program, whose weights choose one at a time.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
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
            yield [(row, i) for i in np.flatnonzero((segments == number) & given.valid[row]).tolist()]


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
                maps.append(unit(np.array([np.mean((x * x) ** (loss.power / 2)) for x in rows]), 1e-12))
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
    params = {k: x.astype(dtype) for k, x in born(group).items()}
    params["weights"] = np.eye(len(GROUPS[group][0]), dtype=dtype)[list(GROUPS[group][0]).index(name)]
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
    assert {x.distance for x in hidden} == set(DISTANCES) and {x.init for x in hidden} == set(INITS)
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
