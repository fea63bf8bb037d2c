"""How a token is chosen over shards of the vocabulary, against sorting the whole of it."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd_distill as sd
from spmd_distill.collectives import shard_index
from spmd_distill.generation.sampling import GREEDY, Kind, Sampling, allowed, choose, gumbel
from spmd_distill.head.base import IMPOSSIBLE
from spmd_distill.sharding import REPLICATED, MeshLayout

V, PADDED = 29, 32
LAYOUTS = ("single", "tp8", "fsdp2_tp4")


@functools.cache
def program(what: str, layout_name: str, kind: Kind) -> Any:
    """``choose`` or ``allowed`` for logits ``[N, PADDED]``, each shard with its columns; rows are whole everywhere."""
    layout = MeshLayout.load(layout_name)
    axes = layout.vocab_axes
    columns = layout.spec((None, "vocab"))

    def body(z: jax.Array, numbers: Any) -> jax.Array:
        first = shard_index(axes) * z.shape[1]
        if what == "allowed":
            return allowed(z, first, kind, numbers, axes)
        return choose(z, first, jnp.arange(z.shape[0]), jnp.int32(0), kind, numbers, axes)

    out = columns if what == "allowed" else REPLICATED
    return jax.jit(sd.make_mapper("vmap", layout).map(body, (columns, REPLICATED), out))


def over_shards(what: str, layout_name: str, z: np.ndarray, sampling: Sampling, seed: int = 0) -> np.ndarray:
    return np.asarray(program(what, layout_name, sampling.kind)(jnp.asarray(z), sampling.numbers(seed)))


def padded(z: np.ndarray) -> np.ndarray:
    return np.concatenate([z, np.full((len(z), PADDED - V), IMPOSSIBLE, z.dtype)], axis=1)


def probabilities(z: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Of one row, by sorting: the temperature, then the likeliest k, then the smallest set of mass p."""
    z = z.astype(np.float64)
    p = np.exp((z - z.max()) / sampling.temperature)
    order = np.argsort(-p, kind="stable")  # of equals the lower id first
    if sampling.top_k is not None:
        p[order[sampling.top_k :]] = 0
    mass = np.cumsum(p[order]) / p.sum()
    if sampling.top_p < 1:
        p[order[np.searchsorted(mass, np.float64(np.float32(sampling.top_p))) + 1 :]] = 0
    return p / p.sum()


CASES = [
    Sampling(1.0, top_p=p, top_k=k)
    for p, k in itertools.product((1e-6, 0.2, 0.5, 0.9, 0.999, 1.0), (None, 1, 2, 5, 28, 29, 1000))
]


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("kind", ["spread", "sharp", "equal", "few values", "negative zeros"])
def test_the_set_is_the_smallest_of_the_likeliest_tokens(kind, layout_name):
    random = np.random.default_rng(1)
    z = {
        "spread": random.normal(size=(8, V)),
        "sharp": 30 * random.normal(size=(8, V)),
        "equal": np.full((8, V), 3.0),
        "few values": random.integers(-1, 2, (8, V)).astype(float),
        "negative zeros": np.where(random.random((8, V)) < 0.5, -0.0, 0.0),
    }[kind]
    with jax.enable_x64(True):
        for sampling in CASES:
            found = over_shards("allowed", layout_name, padded(z), sampling) > -np.inf
            assert not found[:, V:].any()
            for row, chosen in zip(z, found[:, :V], strict=True):
                assert np.array_equal(chosen, probabilities(row, sampling) > 0), (sampling, row)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.5), Sampling(1.5, top_p=0.8), Sampling(1.0, top_k=7)])
def test_frequencies_are_the_probabilities(sampling, dtype):
    """Chi squared of 50 thousand draws; beyond 5 standard deviations for one in three million right programs."""
    z = np.random.default_rng(0).normal(size=V).astype(dtype) * 1.5
    count = 50_000
    with jax.enable_x64(dtype == "float64"):
        drawn = over_shards("choose", "tp8", padded(np.tile(z, (count, 1))), sampling, seed=5)
    p = probabilities(z, sampling)
    seen = np.bincount(drawn, minlength=V)
    assert seen[p == 0].sum() == 0 and len(seen) == V
    expected = count * p[p > 0]
    chi, freedom = ((seen[p > 0] - expected) ** 2 / expected).sum(), (p > 0).sum() - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom)
    assert chi > freedom - 5 * np.sqrt(2 * freedom)


def test_rare_tokens_are_drawn_as_often_as_they_are_likely():
    """One token in a hundred thousand: noise of 23 bits and more of resolution at its upper end."""
    z = np.full(V, -np.log(1e5), np.float32)
    z[3] = 0
    count = 1_000_000
    noise = jax.jit(lambda rows: gumbel(jnp.uint32(1), rows, jnp.int32(0), jnp.arange(V), jnp.float32))
    drawn = np.concatenate([np.asarray(jnp.argmax(z + noise(rows), 1)) for rows in np.arange(count).reshape(10, -1)])
    rare, expected = (drawn != 3).sum(), count * (V - 1) / (1e5 + V - 1)
    assert abs(rare - expected) < 5 * np.sqrt(expected)


def test_noise_is_gumbel_and_the_same_in_both_types():
    with jax.enable_x64(True):
        given = jnp.uint32(7), jnp.arange(300), jnp.int32(4), jnp.arange(400)
        exact = np.asarray(gumbel(*given, jnp.float64))
        error = np.abs(np.asarray(gumbel(*given, jnp.float32)) - exact)
    assert error[exact > -2].max() < 1e-5 and error.max() < 1e-3  # the lowest decide nothing
    assert np.isfinite(exact).all()
    level = np.sort(np.exp(-np.exp(-exact.ravel())))  # its distribution function makes it uniform
    assert np.abs(level - (np.arange(level.size) + 0.5) / level.size).max() < 2 / np.sqrt(level.size)
    part = np.asarray(gumbel(jnp.uint32(7), jnp.arange(100, 110), jnp.int32(4), jnp.arange(37, 50), jnp.float32))
    assert np.abs(part - exact[100:110, 37:50]).max() < 1e-5


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_the_greedy_choice_is_the_lowest_id_of_the_highest_logits(layout_name):
    z = np.random.default_rng(0).integers(-2, 3, (64, V)).astype(np.float32)
    z[0], z[1] = -5, -np.inf
    z[1, 11] = IMPOSSIBLE / 2
    assert over_shards("choose", layout_name, padded(z), GREEDY).tolist() == z.argmax(1).tolist()


@pytest.mark.parametrize("sampling", [Sampling(1e-40), Sampling(1e-6, top_p=0.5), Sampling(1e30, top_k=4)])
def test_extreme_temperatures(sampling):
    """A vanishing one takes the likeliest, an endless one any that is allowed, and never one that is no token."""
    z = np.random.default_rng(0).normal(size=(500, V)).astype(np.float32)
    found = over_shards("choose", "tp8", padded(z), sampling)
    if sampling.temperature < 1:
        assert found.tolist() == z.argmax(1).tolist()
    else:
        allowed_tokens = np.argsort(-z, axis=1)[:, :4]
        assert (found[:, None] == allowed_tokens).any(1).all()
        assert (np.bincount((found[:, None] == allowed_tokens).argmax(1)) > 80).all()


def test_logits_that_are_not_numbers_choose_a_token_that_exists():
    z = np.full((2, V), np.nan, np.float32)
    assert (over_shards("choose", "tp8", padded(z), GREEDY) < V).all()
    assert (over_shards("choose", "tp8", padded(z), Sampling(1.0, top_p=0.5)) < V).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; expected a number from 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; expected a number above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_k": 0}, "top_k is 0; expected a whole number from 1 on, or None"),
        ({"top_k": True}, "top_k is True"),
    ],
)
def test_bad_numbers_are_named(given, message):
    with pytest.raises(sd.UserError, match=message):
        Sampling(**given)
