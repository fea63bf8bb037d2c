"""The cache: every step of generation against a pass over the whole row, for every family."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import CONFIGS
from jax import lax
from whole_rows import SINGLE, alone, whole

import spmd_distill as sd
from spmd_distill.generation import GREEDY
from spmd_distill.generation.loop import Generation
from spmd_distill.generation.run import _batched
from spmd_distill.models import FAMILIES, Model, Shard
from spmd_distill.models.cache import Cache, empty_cache
from spmd_distill.state import init_params
from spmd_distill.types import Batch

EXACT = 1e-9
LENGTHS = (1, 6, 14, 20)
"""Shorter and longer than the windows (5); 14 crosses the length (16) from where phi3-long turns otherwise."""


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def followed(model: Model, params: Any, prompts: list[np.ndarray], forced: np.ndarray) -> np.ndarray:
    """Logits ``[B, T, V]`` before each of the tokens ``forced [B, T]``, read one at a time into a cache."""
    steps = forced.shape[1]
    one = Generation(model, SINGLE.layout, "float64", model.config.tokens, GREEDY.kind, steps)

    def logits(out: Any) -> jax.Array:
        return one.logits(out, jnp.arange(len(prompts)))[0]

    def body(params: Any, prompt: Any, forced: jax.Array) -> jax.Array:
        out, first = one.read(params, prompt)

        def step(memory: Any, number: jax.Array) -> Any:
            column = prompt["tokens"].shape[1] - 1 + number
            out, after = one.advance(params, prompt, Cache(*memory, column, fresh=False), forced, number)
            return (after.k, after.v, after.segments), logits(out)

        _, rest = lax.scan(step, (first.k, first.v, first.segments), jnp.arange(1, steps))
        return jnp.concatenate([logits(out)[None], rest])

    prompt = _batched(prompts, 1)
    return np.moveaxis(np.asarray(jax.jit(alone(body))(params, prompt, forced)), 0, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_has_the_logits_of_a_pass_over_the_whole_row(name):
    family = FAMILIES[CONFIGS[name]["architectures"][0]]
    config = family.config_from_huggingface(CONFIGS[name])
    model = sd.decoder(
        sd.DecoderConfig(**vars(config) | {"init_std": 0.3, "param_dtype": "float64", "attention_block": 8})
    )
    params = init_params(model, SINGLE, seed=1)
    random, steps = np.random.default_rng(0), 8
    prompts = [random.integers(0, 131, n) for n in LENGTHS]
    forced = random.integers(0, 131, (len(prompts), steps)).astype(np.int32)
    found = followed(model, params, prompts, forced)
    rows = [np.concatenate([p, more[:t]]) for p, more in zip(prompts, forced, strict=True) for t in range(steps)]
    expected = whole(model, params, rows).reshape(found.shape)
    error = np.abs(found - expected)[..., :131].max(-1) / np.abs(expected[..., :131]).max()
    assert error.max() < EXACT, error


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_row_may_be_read_in_pieces(name):
    """`Model.apply_cached` by itself: each call goes on where the last one ended."""
    family = FAMILIES[CONFIGS[name]["architectures"][0]]
    config = family.config_from_huggingface(CONFIGS[name])
    model = sd.decoder(sd.DecoderConfig(**vars(config) | {"init_std": 0.3, "param_dtype": "float64"}))
    params = init_params(model, SINGLE, seed=1)
    tokens = np.random.default_rng(0).integers(0, 131, (2, 20)).astype(np.int32)
    positions, ones = np.tile(np.arange(20, dtype=np.int32), (2, 1)), np.ones_like(tokens)
    shard = Shard(SINGLE.layout, jnp.dtype("float64"))

    def body(params: Any, batch: Batch, _: Any) -> Any:
        cache, pieces, begin = empty_cache(model.config, 2, 24, config.kv_heads, jnp.float64), [], 0
        for end in (7, 8, 14, 20):
            piece = jax.tree.map(lambda x, begin=begin, end=end: x[:, begin:end], batch)
            out, cache = model.apply_cached(params, piece, shard, cache)
            pieces.append(out.hidden.reshape(2, end - begin, -1))
            begin = end
        return jnp.concatenate(pieces, 1), model.apply(params, batch, shard).hidden.reshape(2, 20, -1)

    batch = Batch(tokens, tokens, ones > 0, positions, ones)
    found, expected = jax.jit(alone(body))(params, batch, ones)
    assert np.abs(found - expected).max() < EXACT * np.abs(expected).max()
