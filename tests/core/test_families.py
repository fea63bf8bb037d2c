"""Every family on many devices against one device, in float64; its config there and back; rotary positions."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import CONFIGS

from spmd_distill.collectives import psum, to_varying
from spmd_distill.errors import UserError
from spmd_distill.mappers import make_mapper
from spmd_distill.models import FAMILIES, DecoderConfig, Shard, decoder
from spmd_distill.models.rope import Rope, rope_from_huggingface, rope_to_huggingface, rotate, rotation_of
from spmd_distill.sharding import sharded_axes
from spmd_distill.types import Batch

B, L = 4, 16


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def config_of(name: str) -> DecoderConfig:
    return FAMILIES[CONFIGS[name]["architectures"][0]].config_from_huggingface(CONFIGS[name])


def batch_of() -> Batch:
    r = np.random.default_rng(0)
    tokens = r.integers(0, 131, (B, L + 1)).astype(np.int32)
    positions = np.tile(np.r_[np.arange(9), np.arange(L - 9)], (B, 1)).astype(np.int32)
    segments = np.tile(np.r_[np.full(9, 1), np.full(L - 9, 2)], (B, 1)).astype(np.int32)
    segments[1, 12:] = 0
    return Batch(tokens[:, :-1], tokens[:, 1:], segments > 0, positions, segments)


@functools.cache
def params_of(name: str) -> Any:
    """Random parameters, the scales of norms and the biases too."""
    shapes = decoder(replace(config_of(name), param_dtype="float64")).abstract
    leaves, tree = jax.tree.flatten(shapes)
    r = np.random.default_rng(1)
    return tree.unflatten([r.normal(size=x.shape) * 0.3 for x in leaves])


@functools.cache
def result(name: str, layout_name: str, mapper_name: str) -> Any:
    """Hidden states, and gradients of a fixed functional of them, as numpy arrays."""
    model = decoder(replace(config_of(name), param_dtype="float64", remat="sums"))
    mapper = make_mapper(mapper_name, layout_name)
    layout, specs = mapper.layout, model.specs(mapper.layout)
    missing = jax.tree.map(lambda s: tuple(a for a in layout.batch_axes if a not in sharded_axes(s)), specs)
    shard = Shard(layout, jnp.dtype("float64"))

    def body(params, batch):
        params = jax.tree.map(to_varying, params, missing)

        def loss(params):
            hidden = model.apply(params, batch, shard).hidden
            weight = jnp.sin(jnp.arange(hidden.shape[1])) * batch.mask.reshape(-1, 1)
            return jnp.sum(jnp.sin(hidden) * weight), hidden

        grads, hidden = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(psum, grads, missing), hidden

    rows = layout.spec(("batch", None))
    run = mapper.map(body, (specs, layout.spec(("batch",))), (specs, rows))
    return jax.tree.map(np.asarray, jax.jit(run)(params_of(name), batch_of()))


WHERE = [
    ("dp2_tp4", "pmap"),
    ("fsdp2_sp4", "shard_map"),
    ("fsdp2_tp4", "shard_map"),
    ("tp8", "vmap"),
]
DIFFERENT = ["qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "phi4"]


@pytest.mark.parametrize(("layout_name", "mapper_name"), WHERE)
@pytest.mark.parametrize("name", DIFFERENT)
def test_values_and_gradients_are_those_of_one_device(name, layout_name, mapper_name):
    expected = result(name, "single", "vmap")
    found = result(name, layout_name, mapper_name)

    def equal(path, x, y):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9 * max(np.abs(y).max(), 1e-3), err_msg=str(path))

    jax.tree_util.tree_map_with_path(equal, found, expected)
    grads = {key: value for key, value in expected[0].items() if key != "unembed"}
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


# Configs


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_comes_back(name):
    family, config = FAMILIES[CONFIGS[name]["architectures"][0]], config_of(name)
    written = family.config_to_huggingface(config, {"eos_token_id": 7, "hidden_size": 1})
    assert family.config_from_huggingface(written) == config
    assert written["eos_token_id"] == 7
    for key, value in CONFIGS[name].items():
        if key in written and key not in ("rope_scaling", "eos_token_id"):
            assert written[key] == value, key


@pytest.mark.parametrize("name", CONFIGS)
def test_some_of_the_layers_keep_what_they_were(name):
    family, config = FAMILIES[CONFIGS[name]["architectures"][0]], config_of(name)
    few = config.of_layers((2, 0))
    assert few.is_local == (config.is_local[2], config.is_local[0])
    again = family.config_from_huggingface(family.config_to_huggingface(few, CONFIGS[name]))
    assert again.is_local == few.is_local and again.layers == 2


def test_every_family_has_a_case():
    assert {config["architectures"][0] for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3", {"attention_bias": True}, "qwen3 config: attention_bias: True is not supported; expected False"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "layer_types names 'chunked_attention'"),
        ("gemma3", {"layer_types": ["full_attention"]}, "1 entries in local_layers for 3 layers"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_act 'relu' is not supported"),
        ("phi3-long", {"rope_scaling": {"type": "longrope", "short_factor": "x"}}, "short_factor|cannot be read"),
        ("mistral", {"sliding_window": 0}, "window is 0; it must be at least 1"),
    ],
)
def test_what_a_family_does_not_have_is_refused(name, change, message):
    config = CONFIGS[name] | change
    with pytest.raises(UserError, match=message):
        FAMILIES[config["architectures"][0]].config_from_huggingface(config)


# Rotary positions


ROPES = {
    "default": Rope(5e5),
    "linear": Rope(kind="linear", factor=2.0),
    "llama3": Rope(5e5, "llama3", 8.0, 8192),
    "yarn": Rope(1e6, "yarn", 4.0, 32768),
    "longrope": Rope(
        kind="longrope", factor=4.0, original_length=16, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_positions_come_back(kind):
    rope = ROPES[kind]
    config = {"rope_theta": rope.theta, "rope_scaling": rope_to_huggingface(rope), "max_position_embeddings": 64}
    if kind == "longrope":
        config["original_max_position_embeddings"] = 16
    assert rope_from_huggingface(config) == rope
    scaling = config.pop("rope_scaling") or {}
    config |= {"rope_parameters": scaling | {"rope_theta": config.pop("rope_theta")}}
    assert rope_from_huggingface(config) == rope  # as transformers 5 writes it


def test_frequencies_in_closed_form():
    """Fast ones are kept, slow ones divided: Llama 3.1's numbers, by hand."""
    rope, plain = ROPES["llama3"], Rope(5e5)
    found, before = rope.frequencies(128), plain.frequencies(128)
    wavelengths = 2 * np.pi / before
    np.testing.assert_array_equal(found[wavelengths < 8192 / 4], before[wavelengths < 8192 / 4])
    np.testing.assert_allclose(found[wavelengths > 8192], before[wavelengths > 8192] / 8, rtol=1e-12)
    assert (np.diff(found) < 0).all()
    np.testing.assert_allclose(ROPES["linear"].frequencies(8), Rope().frequencies(8) / 2)
    assert ROPES["yarn"].scale == pytest.approx(0.1 * np.log(4) + 1)


def test_a_long_row_turns_by_the_long_factors_and_a_short_one_does_not():
    rope = ROPES["longrope"]
    positions = jnp.asarray([[0, 5, 15], [0, 5, 16]], jnp.int32)
    cos, _ = rotation_of(positions, 8, rope, jnp.float64)
    plain = Rope().frequencies(8)
    np.testing.assert_allclose(cos[0, :, 0], rope.scale * np.cos(np.outer([0, 5, 15], plain)), rtol=1e-12)
    np.testing.assert_allclose(cos[1, :, 0], rope.scale * np.cos(np.outer([0, 5, 16], plain / 2)), rtol=1e-12)


def test_channels_beyond_the_turning_ones_carry_no_position():
    rope = Rope(fraction=0.5)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 8)))
    turned = rotate(x, rotation_of(jnp.asarray([[0, 1, 2]], jnp.int32), 8, rope, jnp.float64))
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    assert np.abs(np.asarray(turned - x))[0, 1:, :, :4].min() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "dynamic"}, "kind 'dynamic' is not supported"),
        ({"theta": 0.0}, "must be positive"),
        ({"kind": "yarn"}, "need the length of the first training"),
        ({"kind": "llama3", "original_length": 8, "low_frequency_factor": 4.0}, "must be below"),
    ],
)
def test_rotary_positions_that_cannot_be(change, message):
    with pytest.raises(UserError, match=message):
        Rope(**change)
