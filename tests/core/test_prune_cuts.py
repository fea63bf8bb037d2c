"""Cutting a model: what is kept is kept bit for bit, what adds nothing costs nothing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import CONFIGS
from prunable import ONE, logits, model_of

from spmd_distill.errors import UserError
from spmd_distill.models import decoder
from spmd_distill.prune import Keep, cut, keep_by_importance


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_keeping_everything_is_the_identity(name):
    model, params = model_of(name)
    c = model.config
    keep = Keep(
        tuple(range(c.layers)),
        np.tile(np.arange(c.mlp), (c.layers, 1)),
        np.tile(np.arange(c.kv_heads), (c.layers, 1)),
        np.tile(np.arange(c.heads), (c.layers, 1)),
        np.arange(c.width),
        np.arange(c.tokens),
    )
    same, new = cut(params, model, keep, ONE)
    assert new.config == c
    padding = jax.tree.map(lambda x, axes: x.at[c.tokens :].set(0) if axes[0] == "vocab" else x, params, model.axes)
    jax.tree.map(np.testing.assert_array_equal, same, padding)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3", "gemma3", "phi3"])
def test_what_adds_nothing_is_cut_without_a_trace(name):
    """Neurons, heads and a layer that write zeros; OLMo 2 is not here: its norm looks at all heads together."""
    model, params = model_of(name)
    c = model.config
    params = jax.tree.map(jnp.copy, params)
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    group = c.heads // c.kv_heads
    neurons, heads = [], []
    for layer in range(c.layers):
        dead_neurons, dead_head = [(7 * layer + i) % c.mlp for i in range(5)], layer % c.kv_heads
        mlp["down"] = mlp["down"].at[layer, jnp.asarray(dead_neurons)].set(0)
        dead = slice(dead_head * group, (dead_head + 1) * group)
        attention["o"] = attention["o"].at[layer, dead].set(0)
        neurons.append(np.setdiff1d(np.arange(c.mlp), dead_neurons))
        heads.append(np.setdiff1d(np.arange(c.kv_heads), [dead_head]))
    attention["o"], mlp["down"] = attention["o"].at[1].set(0), mlp["down"].at[1].set(0)
    kept = [0, 2]
    tokens = np.random.default_rng(0).permutation(131)[:40]
    keep = Keep((0, 2), np.stack(neurons)[kept], np.stack(heads)[kept])
    small, new = cut(params, model, keep, ONE)
    assert (new.config.layers, new.config.mlp, new.config.heads) == (2, c.mlp - 5, c.heads - group)
    assert new.config.is_local == (c.is_local[0], c.is_local[2])
    expected = logits(model, params)
    np.testing.assert_allclose(logits(new, small), expected, rtol=1e-9, atol=1e-9)
    trimmed, narrow = cut(small, new, Keep(tokens=tokens), ONE)
    unchanged = {k: v for k, v in trimmed.items() if k not in ("embed", "unembed")}
    jax.tree.map(np.testing.assert_array_equal, unchanged, {k: small[k] for k in unchanged})
    np.testing.assert_array_equal(trimmed["embed"][:40], small["embed"][tokens])
    assert not np.asarray(trimmed["embed"][40:]).any() and narrow.config.tokens == 40


@pytest.mark.parametrize("name", ["smollm2", "qwen2", "gemma2", "phi4"])
def test_query_heads_that_add_nothing_are_cut_out_of_their_groups(name):
    model, params = model_of(name)
    c = model.config
    group = c.heads // c.kv_heads
    kept = np.stack([np.arange(c.kv_heads) * group + (layer + np.arange(c.kv_heads)) % group for layer in range(3)])
    attention = dict(params["layers"]["attention"])
    for layer in range(3):
        dead = np.setdiff1d(np.arange(c.heads), kept[layer])
        attention["o"] = attention["o"].at[layer, dead].set(0)
    params = params | {"layers": params["layers"] | {"attention": attention}}
    small, new = cut(params, model, Keep(heads=kept), ONE)
    assert (new.config.heads, new.config.kv_heads) == (c.kv_heads, c.kv_heads)
    np.testing.assert_allclose(logits(new, small), logits(model, params), rtol=1e-9, atol=1e-9)
    swapped = kept[:, ::-1]
    with pytest.raises(UserError, match="do not share the kept key/value heads"):
        Keep(heads=swapped).sizes(c)


@pytest.mark.parametrize("name", ["llama", "smollm2", "qwen3", "gemma2", "gemma3", "olmo2", "phi3"])
def test_channels_that_carry_nothing_are_cut_without_a_trace(name):
    """Norms look at the mean over the width, and Gemma's embedding is scaled by its root: both follow."""
    model, params = model_of(name)
    model = decoder(replace(model.config, norm_eps=1e-20))
    dead = np.array([3, 17, 30])
    params = jax.tree.map(lambda x, axes: x.at[..., dead].set(0) if axes[-1] == "embed" else x, params, model.axes)
    small, new = cut(params, model, Keep(channels=np.setdiff1d(np.arange(36), dead)), ONE)
    assert new.config.width == 33
    assert new.config.embed_scale == (np.sqrt(33) if name.startswith("gemma") else 1)
    np.testing.assert_allclose(logits(new, small), logits(model, params), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"mlp": 49}, "mlp is 49; the teacher has 48"),
        ({"kv_heads": 0}, "kv_heads is 0; the teacher has 3"),
        ({"width": 99}, "width is 99; the teacher has 36"),
        ({"heads": 4}, "heads is 4 with 3 key/value heads, each of which 2 query heads share; .* one of 3, 6"),
        ({"heads": 6, "kv_heads": 2}, "heads is 6 with 2 key/value heads, .* one of 2, 4"),
    ],
)
def test_sizes_that_cannot_be(wanted, message):
    with pytest.raises(UserError, match=message):
        keep_by_importance(model_of("llama")[0].config, None, **wanted)


def test_what_cannot_be_cut_says_so():
    gemma = model_of("gemma3")[0].config
    with pytest.raises(UserError, match=r"Layers \[0, 9\] were to be kept; expected some of 0 to 2"):
        Keep(layers=(0, 9)).sizes(gemma)
    with pytest.raises(UserError, match="tokens to keep are not all of the model's, 0 to 130"):
        Keep(tokens=np.array([131])).sizes(gemma)
