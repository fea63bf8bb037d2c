"""The decoder on every kind of layout against the same decoder on one device, and what attention may see."""

import collections
import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_distill.collectives import psum, to_varying
from spmd_distill.errors import UserError
from spmd_distill.mappers import make_mapper
from spmd_distill.models import DecoderConfig, Shard, decoder, export_params, llama, load_params
from spmd_distill.models.base import dropout_factors, keys_of_rows, token_keys
from spmd_distill.models.config import REMAT_POLICIES, VOCAB_MULTIPLE
from spmd_distill.models.heads import head_plan
from spmd_distill.models.rope import Rope
from spmd_distill.sharding import MeshLayout, sharded_axes
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch

B, L = 4, 8
ODD = DecoderConfig(
    vocab_size=97, width=16, layers=2, heads=9, kv_heads=3, head_dim=4, mlp=16,
    param_dtype="float64", init_std=0.4,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def batch_of(seed: int = 0, vocab: int = 97) -> Batch:
    """Two documents in each row, and padding behind them in row 1."""
    r = np.random.default_rng(seed)
    tokens = r.integers(0, vocab, (B, L + 1)).astype(np.int32)
    positions = np.tile(np.r_[np.arange(5), np.arange(L - 5)], (B, 1)).astype(np.int32)
    segments = np.tile(np.r_[np.full(5, 1), np.full(L - 5, 2)], (B, 1)).astype(np.int32)
    segments[1, 6:] = 0
    return Batch(tokens[:, :-1], tokens[:, 1:], segments > 0, positions, segments)


@functools.cache
def params_of(config: DecoderConfig) -> Any:
    return jax.device_get(jax.jit(decoder(config).init)(jax.random.key(0)))


@functools.cache
def runner(config: DecoderConfig, layout_name: str):
    """(params, batch, seed of dropout) -> hidden states and logits, as global arrays."""
    model, layout = decoder(config), MeshLayout.load(layout_name)
    shard = Shard(layout, jnp.dtype(config.param_dtype))

    def body(params, batch, seed):
        keys = keys_of_rows(jax.random.key(seed), len(batch.tokens), layout.batch_axes)
        out = model.apply(params, batch, shard, keys if config.dropout else None)
        logits = jnp.dot(out.hidden, out.unembed.T)
        return tuple(x.reshape(*batch.tokens.shape, -1) for x in (out.hidden, logits))

    rows, whole = layout.spec(("batch",)), layout.spec(())
    specs = (model.specs(layout), rows, whole)
    mapper = make_mapper("shard_map", layout)
    run = jax.jit(mapper.map(body, specs, (rows, layout.spec(("batch", None, "vocab")))))
    return lambda params, batch, seed=0: jax.tree.map(np.asarray, run(params, batch, np.uint32(seed)))


# Which heads a shard computes


@pytest.mark.parametrize("shards", range(1, 9))
def test_every_query_head_is_computed_once_beside_its_own_key_value_head(shards):
    for kv_heads in range(1, 9):
        for heads in range(kv_heads, 17, kv_heads):
            plan = head_plan(heads, kv_heads, shards)
            queries, key_values = np.array(plan.queries), np.array(plan.key_values)
            assert len(queries) == len(key_values) == shards
            local, places = queries.shape[1], key_values.shape[1]
            assert local % places == 0
            partner = np.repeat(key_values, local // places, axis=1)
            here = queries < heads
            assert sorted(queries[here]) == list(range(heads))
            assert (partner[here] == queries[here] // (heads // kv_heads)).all()
            assert (queries[~here] == heads).all() and ((key_values <= kv_heads) & (key_values >= 0)).all()
            if heads % shards == 0:  # stored cut: each shard computes what it holds
                assert (queries == np.arange(heads).reshape(shards, -1)).all()
            if heads % shards == 0 and kv_heads % shards == 0:
                assert (key_values == np.arange(kv_heads).reshape(shards, -1)).all()
            assert local <= 1.5 * math.ceil(heads / shards)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shards", "queries", "key_values"),
    [
        (9, 3, 4, [3, 3, 3, 0], [[0], [1], [2], [3]]),  # SmolLM2: one shard idles
        (14, 2, 4, [4, 3, 4, 3], [[0], [0], [1], [1]]),  # Qwen2.5-0.5B: key/value heads on two shards each
        (14, 2, 8, [2, 2, 2, 1] * 2, [[0]] * 4 + [[1]] * 4),
        (6, 2, 4, [2, 1, 2, 1], [[0], [0], [1], [1]]),
        (5, 5, 4, [2, 2, 1, 0], [[0, 1], [2, 3], [4, 5], [5, 5]]),
        (8, 2, 4, [2, 2, 2, 2], [[0], [0], [1], [1]]),  # queries cut, key/value heads shared
        (12, 3, 2, [6, 6], [[0, 0, 0, 0, 1, 1], [1, 1, 2, 2, 2, 2]]),  # a shard's queries span groups unevenly
        (32, 8, 4, [8] * 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_the_load_of_each_shard(heads, kv_heads, shards, queries, key_values):
    plan = head_plan(heads, kv_heads, shards)
    assert [sum(q < heads for q in row) for row in plan.queries] == queries
    assert [list(row) for row in plan.key_values] == key_values


# The decoder on many devices


HEADS = [
    replace(ODD, heads=9, kv_heads=3),
    replace(ODD, heads=14, kv_heads=2, tied=False, vocab_size=131),
    replace(ODD, heads=6, kv_heads=2, width=12),  # a width that 8 does not divide
    replace(ODD, heads=5, kv_heads=5, tied=False, width=12),
]


CASES = [*HEADS, replace(ODD, dropout=0.5)]


@pytest.mark.parametrize("layout_name", ["dp2_tp4", "tp8", "sp2_tp4", "fsdp2_sp4"])
@pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.heads}-{c.kv_heads}-{c.dropout}")
def test_hidden_states_and_logits_are_those_of_one_device(config, layout_name):
    batch, params = batch_of(vocab=config.vocab_size), params_of(config)
    alone = runner(config, "single")(params, batch, 5)
    for name, x, y in zip(("hidden", "logits"), runner(config, layout_name)(params, batch, 5), alone, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9, err_msg=name)


def gradient_of(config: DecoderConfig, layout_name: str, mapper_name: str, compute: Any = jnp.float64):
    """Compiled: (params, batch) -> gradients of a fixed functional of the hidden states."""
    model, layout = decoder(config), MeshLayout.load(layout_name)
    shard, specs = Shard(layout, jnp.dtype(compute)), model.specs(layout)
    missing = jax.tree.map(lambda s: tuple(a for a in layout.batch_axes if a not in sharded_axes(s)), specs)

    def body(params, batch):
        params = jax.tree.map(to_varying, params, missing)
        weight = jnp.sin(jnp.arange(config.width)) * batch.mask.reshape(-1, 1)
        grads = jax.grad(lambda p: jnp.sum(jnp.sin(model.apply(p, batch, shard).hidden) * weight))(params)
        return jax.tree.map(psum, grads, missing)

    run = make_mapper(mapper_name, layout).map(body, (specs, layout.spec(("batch",))), specs)
    return jax.jit(run).lower(params_of(config), batch_of()).compile()


@pytest.mark.parametrize(("width", "mapper_name"), [(12, "vmap"), (16, "vmap"), (16, "shard_map")])
def test_gradients_of_heads_that_do_not_divide(width, mapper_name):
    """Width 16 is cut over data and model, 12 over data only; the layout also cuts the sequence."""
    config = replace(ODD, width=width)
    plain = gradient_of(config, "single", "shard_map")(params_of(config), batch_of())
    found = gradient_of(config, "fsdp2_sp4", mapper_name)(params_of(config), batch_of())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9), found, plain)


def test_what_is_kept_for_the_backward_pass_changes_memory_and_nothing_else():
    deep = replace(ODD, layers=6, mlp=64, width=64)
    grads, memory = {}, {}
    for policy in REMAT_POLICIES:
        config = replace(deep, remat=policy)
        compiled = gradient_of(config, "single", "shard_map")
        memory[policy] = compiled.memory_analysis().temp_size_in_bytes
        grads[policy] = compiled(params_of(deep), batch_of())
    assert set(grads) == {"none", "dots", "sums", "full"}
    assert memory["full"] < memory["sums"] < memory["dots"] < memory["none"], memory
    for policy in ("dots", "sums", "full"):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12), grads[policy], grads["none"]
        )


# What attention may see


@pytest.mark.parametrize("layout_name", ["single", "sp2_tp4"])
def test_attention_stays_inside_its_segment_and_looks_back_only(layout_name):
    run, params, batch = runner(ODD, layout_name), params_of(ODD), batch_of()
    before = run(params, batch)[0]
    for place in range(L):
        tokens = batch.tokens.copy()
        tokens[:, place] = (tokens[:, place] + 1) % 97
        moved = (run(params, batch.replace(tokens=tokens))[0] != before).any(-1)
        same = batch.segments == batch.segments[:, place : place + 1]
        np.testing.assert_array_equal(moved, same & (np.arange(L) >= place))


@pytest.mark.parametrize("layout_name", ["single", "sp2_tp4"])
def test_a_document_reads_the_same_wherever_it_lies(layout_name):
    """Alone and padded on the right, alone and padded on the left, or packed with another one."""
    run, params, batch = runner(ODD, layout_name), params_of(ODD), batch_of()
    document = batch.tokens[0, :5]
    rows = np.random.default_rng(1).integers(0, 97, (B, L)).astype(np.int32)
    positions, segments = np.zeros((B, L), np.int32), np.zeros((B, L), np.int32)
    starts = [0, 3, 0, 3]
    for row, start in enumerate(starts):
        rows[row, start : start + 5] = document
        positions[row, start : start + 5] = np.arange(5)
        segments[row, start : start + 5] = 1
    segments[2, 5:] = 2
    segments[3, :3] = 2
    out = run(params, Batch(rows, rows, segments == 1, positions, segments))[0]
    for row, start in enumerate(starts):
        np.testing.assert_allclose(out[row, start : start + 5], out[0, :5], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(run(params, batch)[0][0, :5], out[0, :5], rtol=1e-12, atol=1e-12)
    assert np.isfinite(out).all()


def test_positions_count_inside_a_document():
    run, params, batch = runner(ODD, "single"), params_of(ODD), batch_of()
    shifted = run(params, batch.replace(positions=batch.positions + 7))[0]
    np.testing.assert_allclose(shifted, run(params, batch)[0], rtol=1e-10, atol=1e-10)  # only differences count
    stretched = run(params, batch.replace(positions=batch.positions * 2))[0]
    assert np.abs(stretched - shifted)[:, 2:5].max() > 1e-3


# Dropout


def test_every_token_layer_and_place_draws_its_own_mask():
    def body(seed):
        shard = Shard(MeshLayout.load("single"), jnp.float64)
        keys = token_keys(keys_of_rows(jax.random.key(seed), B, ()), L, shard)
        return jnp.stack([dropout_factors(keys, jnp.int32(n), 2, 0.25, 64, jnp.float64) for n in range(3)])

    run = make_mapper("vmap", MeshLayout.load("single")).map(body, (P(),), P())
    one, again, other = (np.asarray(jax.jit(run)(np.uint32(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert set(np.unique(one)) == {0, 4 / 3}
    assert one.shape == (3, 2, B, L, 64)  # layers, places, rows, columns, width
    masks = np.concatenate([one.reshape(-1, 64), other.reshape(-1, 64)])
    assert len(np.unique(masks, axis=0)) == len(masks)
    assert abs(np.mean(masks > 0) - 0.75) < 0.01


def test_steps_move_dropout_and_no_key_means_none():
    config = replace(ODD, dropout=0.5)
    batch, params = batch_of(), params_of(config)
    run = runner(config, "single")
    three, again, four = (run(params, batch, seed)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(three, again)
    assert (np.abs(three - four).max(-1) > 1e-3).all()
    teacher = OnlineTeacher(decoder(config))
    layout = MeshLayout.load("single")

    def body(params, batch):
        return teacher.targets(params, batch, Shard(layout, jnp.float64), {})[0].hidden.reshape(B, L, -1)

    targets = jax.jit(make_mapper("vmap", layout).map(body, (P(), P()), P()))(params, batch)
    np.testing.assert_allclose(targets, runner(ODD, "single")(params, batch)[0], rtol=1e-12, atol=1e-12)


def test_a_layer_draws_its_own_masks_inside_the_model():
    """Two layers of equal weights write into the second half of the width only what they read in the first.

    Each adds the same vector, or under dropout its double or 0: together 0, 1 or 2 times what both add without.
    """
    config, half = replace(ODD, norm_eps=1e-12), ODD.width // 2
    params = jax.tree.map(np.copy, params_of(config))
    params["embed"][:, half:] = 0
    attention, mlp = (params["layers"][name] for name in ("attention", "mlp"))
    attention["o"][:] = 0
    for weight in mlp.values():
        weight[1] = weight[0]
    mlp["gate"][:, half:] = mlp["up"][:, half:] = 0
    mlp["down"][:, :, :half] = 0
    mlp["down"] *= 1e-6
    plain, dropped = (runner(c, "single")(params, batch_of(), 3)[0] for c in (config, replace(config, dropout=0.5)))
    counts = collections.Counter(np.round((dropped / plain)[..., half:].ravel(), 3))
    assert set(counts) <= {0.0, 1.0, 2.0}
    assert 0.4 < counts[1.0] / counts.total() < 0.6


# Checkpoints


def weights_of(config: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """A Hugging Face checkpoint of this size, by the shapes that Llama has."""
    d, f, c, v = config.width, config.mlp, config.head_dim, config.vocab_size
    layer = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (config.heads * c, d),
        "self_attn.k_proj": (config.kv_heads * c, d),
        "self_attn.v_proj": (config.kv_heads * c, d),
        "self_attn.o_proj": (d, config.heads * c),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    shapes = {f"model.layers.{i}.{k}.weight": s for i in range(config.layers) for k, s in layer.items()}
    shapes |= {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    shapes |= {} if config.tied else {"lm_head.weight": (v, d)}
    r = np.random.default_rng(seed)
    return {name: r.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("layout_name", ["dp2_tp4", "fsdp2_sp4"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_comes_back_bit_for_bit(layout_name, tied):
    config = replace(ODD, tied=tied, layers=3, param_dtype="float32")
    model, weights = decoder(config), weights_of(config)
    layout = MeshLayout.load(layout_name)
    mapper = make_mapper("shard_map", layout)
    params = load_params(model, llama.rules(config), weights | {"rotary.inv_freq": np.ones(3)}, mapper)
    assert jax.tree.structure(params) == jax.tree.structure(model.abstract)
    jax.tree.map(lambda x, s: np.testing.assert_equal(x.sharding, s), params, mapper.shardings(model.specs(layout)))
    assert not np.asarray(params["embed"])[config.vocab_size :].any()
    back = dict(export_params(params, llama.rules(config)))
    assert back.keys() == weights.keys()
    for name, array in back.items():
        np.testing.assert_array_equal(array, weights[name], name)
        assert array.dtype == np.float32 and array.flags.c_contiguous


@pytest.mark.parametrize("rows", [64, 256])
def test_stored_rows_may_be_those_of_another_model(rows):
    """The tokens beyond fewer rows are cut out: logits of the others are those of a model that never had them."""
    config = replace(ODD, tied=False, param_dtype="float32", vocab_rows=rows)
    weights, tokens = weights_of(config), min(97, rows)
    layout = MeshLayout.load("dp2_tp4")
    mapper = make_mapper("shard_map", layout)
    params = load_params(decoder(config), llama.rules(config), weights, mapper)
    assert params["embed"].shape == params["unembed"].shape == (rows, config.width)
    sliced = {k: w[:tokens] if w.shape[0] == 97 else w for k, w in weights.items()}
    plain = replace(config, vocab_size=tokens, vocab_rows=None)
    expected = load_params(decoder(plain), llama.rules(plain), sliced, mapper)
    batch = batch_of(vocab=tokens)
    found, found_plain = runner(config, "dp2_tp4")(params, batch), runner(plain, "dp2_tp4")(expected, batch)
    scale = np.abs(found_plain[1]).max()  # the compiler may add up another number of rows in another order
    np.testing.assert_allclose(found[0], found_plain[0], rtol=1e-5, atol=1e-6 * np.abs(found_plain[0]).max())
    np.testing.assert_allclose(found[1][..., :tokens], found_plain[1][..., :tokens], rtol=1e-5, atol=1e-6 * scale)
    assert config.tokens == plain.tokens == tokens
    back = dict(export_params(params, llama.rules(config)))
    assert back.keys() == sliced.keys()
    for name, array in back.items():
        np.testing.assert_array_equal(array, sliced[name], name)
    assert llama.config_to_huggingface(config)["vocab_size"] == tokens


def test_a_student_takes_the_layers_it_is_given():
    config = replace(ODD, layers=2, param_dtype="float32")
    weights = weights_of(replace(config, layers=5))
    mapper = make_mapper("vmap", MeshLayout.load("single"))
    params = load_params(decoder(config), llama.rules(config), weights, mapper, layers=(4, 1))
    back = dict(export_params(params, llama.rules(config)))
    for ours, theirs in ((0, 4), (1, 1)):
        for part in ("input_layernorm", "self_attn.q_proj", "mlp.down_proj"):
            name = f"model.layers.{{}}.{part}.weight"
            np.testing.assert_array_equal(back[name.format(ours)], weights[name.format(theirs)])


def test_what_is_wrong_with_a_checkpoint_is_named():
    config = replace(ODD, tied=False, param_dtype="float32")
    model, weights = decoder(config), weights_of(config)
    mapper = make_mapper("vmap", MeshLayout.load("single"))
    for name in weights:
        lacking = {k: w for k, w in weights.items() if k != name}
        with pytest.raises(UserError, match=f"my-folder.*'{name}'.*missing"):
            load_params(model, llama.rules(config), lacking, mapper, source="my-folder")
        turned = weights | {name: np.zeros((*weights[name].shape[::-1], 1), np.float32)}
        shape = str(weights[name].shape).replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(UserError, match=f"my-folder.*'{name}'.*expected {shape}"):
            load_params(model, llama.rules(config), turned, mapper, source="my-folder")


# Configs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[({name: 0}, f"{name} is 0; it must be at least 1") for name in ("vocab_size", "width", "layers", "head_dim")],
        ({"mlp": -4}, "mlp is -4"),
        ({"heads": 6, "kv_heads": 4}, "6 query heads cannot share 4 key/value heads"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"head_dim": 5}, "head_dim is 5; rotary positions need an even number"),
        ({"remat": "some"}, "unknown remat 'some'; expected one of none, full, sums, dots"),
        ({"dropout": 1.0}, "dropout is 1.0; expected 0 <= dropout < 1"),
        ({"dropout": -0.1}, "dropout is -0.1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        replace(ODD, **change)


LLAMA = {
    "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 4, "intermediate_size": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True,
    "hidden_act": "silu", "max_position_embeddings": 64,
}  # fmt: skip


def test_a_llama_config_is_read_and_written():
    config = llama.config_from_huggingface(LLAMA)
    assert config == replace(ODD, param_dtype="float32", init_std=0.02, rope=Rope(1e5), max_length=64)
    assert config.padded_vocab == VOCAB_MULTIPLE and replace(config, vocab_size=128).padded_vocab == VOCAB_MULTIPLE
    written = llama.config_to_huggingface(config, {"eos_token_id": 2, "vocab_size": 5})
    assert written.items() >= (LLAMA | {"eos_token_id": 2}).items()
    assert llama.config_from_huggingface(written) == config
    short = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "head_dim", "rope_theta")}
    short |= {"num_attention_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    config = llama.config_from_huggingface(short)
    assert (config.kv_heads, config.head_dim, config.rope.theta) == (4, 4, 5e5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias: True is not supported; expected False"),
        ({"mlp_bias": True}, "mlp_bias: True is not supported"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; expected one of silu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "kind 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4.0}}, "4.0 must be below high_freq_factor 4.0"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale": 1.0}}, "mscale are not supported"),
        ({"rope_theta": "much"}, "cannot be read"),
        ({"hidden_size": "wide"}, "cannot be read|not a number|a size"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_attention_heads": None}, "'num_attention_heads' is missing"),
    ],
)
def test_a_llama_config_of_another_model_is_refused(change, message):
    config = {k: v for k, v in (LLAMA | change).items() if v is not None}
    with pytest.raises(UserError, match=message):
        llama.config_from_huggingface(config)


def test_a_size_that_a_layout_cannot_cut_is_named():
    with pytest.raises(UserError, match=r"layers\.mlp\.down: .*\(mlp\) has size 10.*4 equal shards over model"):
        decoder(replace(ODD, mlp=10)).specs(MeshLayout.load("dp2_tp4"))
    with pytest.raises(UserError, match=r"embed.*size 15.*'fsdp8'.*8 equal shards over data"):
        decoder(replace(ODD, width=15)).specs(MeshLayout.load("fsdp8"))
