"""What of a model matters: by hand, on every layout the same, and what is kept by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prunable import ONE, B, L, batch_of, model_of

from spmd_distill.mappers import make_mapper
from spmd_distill.models import Shard
from spmd_distill.models.taps import Tap
from spmd_distill.prune import (
    Importance,
    Keep,
    activations,
    agreement,
    cut,
    evenly,
    keep_by_importance,
    layers_to_keep,
    measure_removals,
)
from spmd_distill.prune.keep import best


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


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
            measure_removals(model, p, m, [batch_of()], "float64")(range(3))
            for p, m in ((placed, mapper), (params, ONE))
        ]
        np.testing.assert_allclose(*costs, rtol=1e-9, atol=1e-12)


def test_importance_by_hand():
    """A neuron's: the mean of its absolute value over a row's tokens, padding left out; the root of the squared sum."""
    model, params = model_of("llama")
    shard = Shard(ONE.layout, jnp.dtype("float64"))
    keep = dict.fromkeys(("attention_input", "attention_heads", "mlp_input", "mlp_neurons"), Tap())
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
    costs = measure_removals(model, params, ONE, [batch_of()], "float64")(range(3))
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


def test_which_heads_stay():
    """Two of three key/value heads by the sum over their query heads, then the better one of each pair."""
    config = model_of("llama")[0].config  # 6 query heads on 3
    heads = np.array([[1.0, 2, 9, 3, 4, 0], [5, 4, 1, 1, 7, 8], [0, 1, 2, 3, 4, 5]])
    importance = Importance(np.zeros((3, 48)), heads, heads.reshape(3, 3, 2).sum(-1), np.zeros(36))
    keep = keep_by_importance(config, importance, [0, 1], kv_heads=2, heads=2)
    np.testing.assert_array_equal(keep.kv_heads, [[1, 2], [0, 2]])
    np.testing.assert_array_equal(keep.heads, [[2, 4], [0, 5]])
    np.testing.assert_array_equal(keep_by_importance(config, importance, kv_heads=2).queries(config)[0], [2, 3, 4, 5])
    np.testing.assert_array_equal(keep_by_importance(config, importance, heads=3).heads[2], [1, 3, 5])
