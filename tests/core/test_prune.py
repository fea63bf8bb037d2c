"""Cutting a model: what is kept is kept bit for bit, what adds nothing costs nothing, and layouts change nothing."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import CONFIGS

from spmd_distill.errors import UserError
from spmd_distill.head.base import logits_of
from spmd_distill.mappers import make_mapper
from spmd_distill.models import FAMILIES, Model, Shard, decoder
from spmd_distill.models.taps import TAPS
from spmd_distill.prune import (
    Keep,
    activations,
    agreement,
    cost_of_removing,
    cut,
    evenly,
    keep_by_importance,
    layers_to_keep,
)
from spmd_distill.prune.keep import best
from spmd_distill.sharding import MeshLayout
from spmd_distill.types import Batch

B, L = 4, 12
ONE = make_mapper("vmap", "single")


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def model_of(name: str) -> tuple[Model, Any]:
    config = FAMILIES[CONFIGS[name]["architectures"][0]].config_from_huggingface(CONFIGS[name])
    model = decoder(replace(config, param_dtype="float64"))
    leaves, tree = jax.tree.flatten(model.abstract)
    r = np.random.default_rng(1)
    return model, tree.unflatten([jnp.asarray(r.normal(size=x.shape) * 0.3) for x in leaves])


def batch_of() -> Batch:
    tokens = np.random.default_rng(0).integers(0, 131, (B, L + 1)).astype(np.int32)
    segments = np.tile(np.repeat([1, 2], [7, 5]).astype(np.int32), (B, 1))
    segments[1, 9:] = 0
    positions = np.tile(np.r_[np.arange(7), np.arange(5)].astype(np.int32), (B, 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], segments > 0, positions, segments)


def logits(model: Model, params: Any) -> np.ndarray:
    shard = Shard(MeshLayout.load("single"), jnp.dtype("float64"))

    def run(params, batch):
        out = model.apply(params, batch, shard)
        return logits_of(out, out.hidden, 0)[0]

    spec = ONE.layout.spec(())
    return np.asarray(jax.jit(ONE.map(run, (spec, spec), spec))(params, batch_of()))[:, : model.config.tokens]


@pytest.mark.parametrize("name", CONFIGS)
def test_keeping_everything_is_the_identity(name):
    model, params = model_of(name)
    c = model.config
    keep = Keep(
        tuple(range(c.layers)),
        np.tile(np.arange(c.mlp), (c.layers, 1)),
        np.tile(np.arange(c.kv_heads), (c.layers, 1)),
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


def test_channels_that_carry_nothing():
    """Norms look at the mean over the width: after the cut, everything is as if the missing were not counted."""
    model, params = model_of("llama")
    dead = np.array([3, 17, 30])
    params = jax.tree.map(
        lambda x, axes: x.at[..., dead].set(0) if axes[-1] in ("embed", "act_embed") else x, params, model.axes
    )
    kept = np.setdiff1d(np.arange(36), dead)
    small, new = cut(params, model, Keep(channels=kept), ONE)
    assert new.config.width == 33
    rescaled = replace(model.config, norm_eps=model.config.norm_eps * 33 / 36)
    scaled = jax.tree.map(jnp.copy, params)
    for norm in (scaled["norm"], scaled["layers"]["attention_norm"], scaled["layers"]["mlp_norm"]):
        norm["scale"] = norm["scale"] * np.sqrt(33 / 36)  # the mean over 36 of the squares of 33
    np.testing.assert_allclose(logits(new, small), logits(decoder(rescaled), scaled), rtol=1e-9, atol=1e-9)


# What matters


@pytest.mark.parametrize(
    ("layout_name", "mapper_name"),
    [("dp2_tp4", "shard_map"), ("fsdp2_sp4", "shard_map"), ("tp8", "vmap"), ("dp2_tp4", "pmap")],
)
@pytest.mark.parametrize("name", ["llama", "smollm2", "gemma3"])
def test_importance_is_the_same_on_every_layout(name, layout_name, mapper_name):
    model, params = model_of(name)
    expected = activations(model, params, ONE, [batch_of()] * 2, "float64")
    mapper = make_mapper(mapper_name, layout_name)
    placed = jax.device_put(params, mapper.shardings(model.specs(mapper.layout)))
    found = activations(model, placed, mapper, [batch_of()] * 2, "float64")
    for x, y in zip(vars(found).values(), vars(expected).values(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)  # summed in float32
    if mapper_name != "pmap" and name != "gemma3":
        costs = [
            cost_of_removing(model, p, m, [batch_of()], range(3), dtype="float64")
            for p, m in ((placed, mapper), (params, ONE))
        ]
        np.testing.assert_allclose(*costs, rtol=1e-9, atol=1e-12)


def test_importance_by_hand():
    """A neuron's: the mean of its absolute value over a row's tokens, padding left out; the root of the squared sum."""
    model, params = model_of("llama")
    shard = Shard(ONE.layout, jnp.dtype("float64"))
    keep = dict.fromkeys(TAPS, lambda x: x)
    spec = ONE.layout.spec(())
    body = ONE.map(lambda p, b: model.apply_tapped(p, b, shard, keep)[1], (spec, spec), spec)
    seen = jax.tree.map(np.asarray, jax.jit(body)(params, batch_of()))
    valid = batch_of().segments > 0
    found = activations(model, params, ONE, [batch_of()], "float64")
    rows = [np.abs(seen["mlp_neurons"][:, b, valid[b]]).mean(1) for b in range(B)]
    np.testing.assert_allclose(found.neurons, np.sqrt(sum(r**2 for r in rows)), rtol=1e-5)
    norms = np.linalg.norm(seen["attention_heads"], axis=-1)
    rows = [norms[:, b, valid[b]].mean(1) for b in range(B)]
    np.testing.assert_allclose(found.kv_heads, np.sqrt(sum(r**2 for r in rows)).reshape(3, 3, 2).sum(-1), rtol=1e-5)
    assert {name: x.shape[1:] for name, x in seen.items()} == {
        "attention_input": (B, L, 36), "attention_heads": (B, L, 6, 8), "mlp_input": (B, L, 36),
        "mlp_neurons": (B, L, 48),
    }  # fmt: skip


def test_a_layer_that_does_nothing_costs_nothing():
    model, params = model_of("llama")
    for part, matrix in (("attention", "o"), ("mlp", "down")):
        stack = params["layers"][part]
        stack[matrix] = stack[matrix].at[1].set(0)
    costs = cost_of_removing(model, params, ONE, [batch_of()], range(3), dtype="float64")
    assert abs(costs[1]) < 1e-12 and costs[0] > 0.01 and costs[2] > 0.01
    small, new = cut(params, model, Keep(layers=(0, 2)), ONE)
    found = agreement(new, small, model, params, ONE, [batch_of()], "float64")
    assert abs(found["kl"]) < 1e-12 and found["top1"] == 1.0
    small, new = cut(params, model, Keep(layers=(0, 1)), ONE)
    assert agreement(new, small, model, params, ONE, [batch_of()], "float64")["kl"] == pytest.approx(costs[2], rel=1e-9)


def test_which_layers_stay():
    alone = np.array([5.0, 1.0, 2.0, 4.0])

    def costs(layers, removed):  # layer 2 is worth much once layer 1 is gone
        return np.array([9.0 if i == 2 and 1 in removed else alone[i] for i in layers])

    assert layers_to_keep(costs, 4, 2, one_by_one=False) == (0, 3)
    assert layers_to_keep(costs, 4, 2, one_by_one=True) == (0, 2)
    assert evenly(30, 4) == (0, 10, 19, 29) and evenly(5, 1) == (0,)
    np.testing.assert_array_equal(best(np.array([[1.0, 3, 2], [3, 1, 1]]), 2), [[1, 2], [0, 1]])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"mlp": 49}, "mlp is 49; the teacher has 48"),
        ({"kv_heads": 0}, "kv_heads is 0; the teacher has 3"),
        ({"width": 99}, "width is 99; the teacher has 36"),
    ],
)
def test_sizes_that_cannot_be(wanted, message):
    with pytest.raises(UserError, match=message):
        keep_by_importance(model_of("llama")[0].config, None, **wanted)


def test_what_cannot_be_cut_says_so():
    gemma = model_of("gemma3")[0].config
    with pytest.raises(UserError, match="The width of a gemma3 model cannot be cut"):
        Keep(channels=np.arange(20)).sizes(gemma)
    with pytest.raises(UserError, match=r"Layers \[0, 9\] were to be kept; expected some of 0 to 2"):
        Keep(layers=(0, 9)).sizes(gemma)
    with pytest.raises(UserError, match="tokens to keep are not all of the model's, 0 to 130"):
        Keep(tokens=np.array([131])).sizes(gemma)
