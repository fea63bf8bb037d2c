"""Architectures other than plain llama: what is written comes back under Hugging Face's names, and as its config.

The Hugging Face names and shapes are written out here; the GGUF names come from the gguf package, as for llama.cpp's
own converter.
"""

import gguf
import numpy as np
import pytest
from llama_files import write_gguf

from spmd_distill.errors import UserError
from spmd_distill.interop import gguf_to_huggingface, open_gguf
from spmd_distill.interop.names_architectures import ARCHITECTURES
from spmd_distill.interop.names_config import llama3_factors

HIDDEN, HEADS, KV_HEADS, HEAD, MLP, VOCAB = 64, 4, 2, 24, 96, 40
Q, KV = HEADS * HEAD, KV_HEADS * HEAD
ATTENTION = {
    "self_attn.q_proj.weight": (Q, HIDDEN),
    "self_attn.k_proj.weight": (KV, HIDDEN),
    "self_attn.v_proj.weight": (KV, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, Q),
}
MLPS = {
    "mlp.gate_proj.weight": (MLP, HIDDEN),
    "mlp.up_proj.weight": (MLP, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, MLP),
}
NORMS = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
HEAD_NORMS = {"self_attn.q_norm.weight": (HEAD,), "self_attn.k_norm.weight": (HEAD,)}
FOUR_NORMS = NORMS | {"pre_feedforward_layernorm.weight": (HIDDEN,), "post_feedforward_layernorm.weight": (HIDDEN,)}
LAYERS = {
    "llama": ATTENTION | MLPS | NORMS,
    "qwen2": ATTENTION | MLPS | NORMS
    | {"self_attn.q_proj.bias": (Q,), "self_attn.k_proj.bias": (KV,), "self_attn.v_proj.bias": (KV,)},
    "qwen3": ATTENTION | MLPS | NORMS | HEAD_NORMS,
    "gemma2": ATTENTION | MLPS | FOUR_NORMS,
    "gemma3": ATTENTION | MLPS | FOUR_NORMS | HEAD_NORMS,
    "phi3": NORMS | {
        "self_attn.qkv_proj.weight": (Q + 2 * KV, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, Q),
        "mlp.gate_up_proj.weight": (2 * MLP, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, MLP),
    },
    "olmo2": ATTENTION | MLPS | {
        "post_attention_layernorm.weight": (HIDDEN,),
        "post_feedforward_layernorm.weight": (HIDDEN,),
        "self_attn.q_norm.weight": (Q,),
        "self_attn.k_norm.weight": (KV,),
    },
}  # fmt: skip
COUNT = {"gemma2": 3, "gemma3": 7}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
OWN = {
    "llama": ("LlamaForCausalLM", {"model_type": "llama", "mlp_bias": False}),
    "qwen2": ("Qwen2ForCausalLM", {"model_type": "qwen2", "use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", {"model_type": "qwen3", "use_sliding_window": False, "attention_bias": False}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "model_type": "gemma2",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [LOCAL, GLOBAL, LOCAL],
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": HEAD,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "model_type": "gemma3_text",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [GLOBAL] * 7,
            "sliding_window": None,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": HEAD,
        },
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {"model_type": "phi3", "sliding_window": None, "original_max_position_embeddings": 128},
    ),
    "olmo2": ("Olmo2ForCausalLM", {"model_type": "olmo2"}),
}


def pairs(name: str, **changes) -> dict[str, object]:
    given = {
        "block_count": COUNT.get(name, 2),
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return {f"{name}.{key}": value for key, value in given.items() if value is not None}


def random_weights(name: str, tied: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(COUNT.get(name, 2)):
        shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in LAYERS[name].items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}


def converted(name: str, weights: dict[str, np.ndarray], head: int = HEAD) -> dict[str, np.ndarray]:
    """What llama.cpp's converter makes of Hugging Face weights."""
    code = next(code for code, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(code, COUNT.get(name, 2))
    tensors = {}
    for key, weight in weights.items():
        if name.startswith("gemma") and key.endswith("norm.weight"):
            weight = weight + 1
        if name == "llama" and key.split(".")[-2] in ("q_proj", "k_proj"):
            order = [channel for i in range(head // 2) for channel in (i, i + head // 2)]
            weight = np.concatenate([weight[first:][order] for first in range(0, len(weight), head)])
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        tensors[stored] = weight
    assert len(tensors) == len(weights)
    return tensors


@pytest.fixture
def model(tmp_path):
    def make(name: str, tied: bool = True, drop=(), extra=None, **changes):
        tensors = converted(name, random_weights(name, tied)) | (extra or {})
        for key in drop:
            del tensors[key]
        return open_gguf(write_gguf(tmp_path / "m.gguf", tensors, pairs(name, **changes), architecture=name))

    return make


def test_every_architecture_is_here():
    assert set(LAYERS) == set(OWN) == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "tied"), [(name, tied) for name in LAYERS for tied in (True, False) if tied or name != "gemma2"]
)
def test_what_was_written_comes_back(name, tied, model):
    original = random_weights(name, tied)
    config, weights = gguf_to_huggingface(model(name, tied))
    assert set(weights) == set(original)
    for key, expected in original.items():
        assert weights.shape(key) == expected.shape
        found = weights[key]
        if name.startswith("gemma") and key.endswith("norm.weight"):
            np.testing.assert_allclose(found, expected, rtol=0, atol=5e-7)  # (w + 1) - 1 rounds once
        else:
            assert np.array_equal(found, expected), key
    expected = {
        "architectures": [OWN[name][0]],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": COUNT.get(name, 2),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        **OWN[name][1],
    }
    assert expected.items() <= config.items()


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gemma2", {"attention.sliding_window": 8, "rope.freq_base": None}, {"sliding_window": 8, "rope_theta": 1e4}),
        ("gemma2", {"attn_logit_softcapping": 20.0}, {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0}),
        ("gemma3", {"final_logit_softcapping": 30.0}, {"final_logit_softcapping": 30.0}),
        ("gemma3", {"final_logit_softcapping": 0.0}, {"final_logit_softcapping": None}),
        (
            "gemma3",
            {"attention.sliding_window": 8},
            {"sliding_window": 8, "layer_types": [LOCAL] * 5 + [GLOBAL, LOCAL]},
        ),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": 3, "rope.freq_base_swa": 5000.0},
            {"layer_types": [LOCAL, LOCAL, GLOBAL] * 2 + [LOCAL], "rope_local_base_freq": 5000.0},
        ),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False] * 3 + [True]},
            {"layer_types": [LOCAL, GLOBAL] * 3 + [LOCAL]},
        ),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": 0},
            {"layer_types": [LOCAL] * 7},
        ),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": 1},
            {"layer_types": [GLOBAL] * 7},
        ),
        (
            "gemma3",
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 10000.0},
        ),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, {"rope_scaling": None}),
        ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_scaling": None}),
        ("llama", {"rope.scaling.factor": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        (
            "phi3",
            {"attention.sliding_window": 16, "rope.scaling.original_context_length": 64},
            {"sliding_window": 16, "layer_types": [LOCAL] * 2, "original_max_position_embeddings": 64},
        ),
        ("qwen2", {"attention.key_length": HEAD, "rope.dimension_count": HEAD, "attention.sliding_window": 0}, {}),
    ],
)
def test_metadata_of_one_architecture(name, changes, expected, model):
    config, _ = gguf_to_huggingface(model(name, **changes))
    assert expected.items() <= config.items()


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_models_of_27b_scale_scores_by_the_width_of_a_head(name, layers, monkeypatch, model):
    monkeypatch.setitem(COUNT, name, layers)
    config, _ = gguf_to_huggingface(model(name))
    assert config["query_pre_attn_scalar"] == HIDDEN // HEADS != HEAD


# ---- the frequencies of Llama 3 ---------------------------------------------------------


def converters_factors(head: int, theta: float, factor: float, low=1.0, high=4.0, positions=8192) -> np.ndarray:
    """As llama.cpp's converter computes them, one frequency at a time."""
    found = []
    for i in range(0, head, 2):
        length = 2 * np.pi * theta ** (i / head)
        if length < positions / high:
            found.append(1.0)
        elif length > positions / low:
            found.append(factor)
        else:
            smooth = (positions / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head", [64, 128])
def test_factors_of_llama_3(head, factor):
    stored = converters_factors(head, 5e5, factor)
    assert len(np.unique(stored)) > 3
    np.testing.assert_allclose(llama3_factors(head, 5e5, factor), stored, rtol=1e-6)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_a_tensor_of_factors_becomes_the_scaling_of_llama_3(factor, model):
    stored = converters_factors(HEAD, 1e6, factor)
    config, weights = gguf_to_huggingface(model("llama", extra={"rope_freqs.weight": stored}))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in weights)


def test_factors_of_one_are_none(model):
    config, _ = gguf_to_huggingface(model("llama", extra={"rope_freqs.weight": np.ones(HEAD // 2, np.float32)}))
    assert config["rope_scaling"] is None


@pytest.mark.parametrize(
    "stored",
    [
        converters_factors(HEAD, 1e6, 8.0, high=3.0),
        converters_factors(HEAD, 1e6, 8.0, positions=4096),
        converters_factors(HEAD, 1e4, 8.0),
        np.full(HEAD // 2, 4.0, np.float32),
        np.full(HEAD // 2, np.nan, np.float32),
        np.full(HEAD // 2, np.inf, np.float32),
        -converters_factors(HEAD, 1e6, 8.0),
    ],
)
def test_other_factors_are_refused(stored, model):
    with pytest.raises(UserError, match=r"'rope_freqs.weight' divides .* in another way than Llama 3"):
        gguf_to_huggingface(model("llama", extra={"rope_freqs.weight": stored}))


# ---- what would be another model --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {"drop": ["blk.1.attn_k.bias"]}, r"'blk.1.attn_k.bias' is missing, expected it with shape \(48,\)"),
        ("qwen3", {"drop": ["blk.0.attn_q_norm.weight"]}, r"'blk.0.attn_q_norm.weight' is missing"),
        ("qwen2", {"extra": {"rope_freqs.weight": np.ones(12, "f4")}}, "'rope_freqs.weight'.*no place in a plain"),
        ("phi3", {"extra": {"rope_factors_long.weight": np.ones(12, "f4")}}, "'rope_factors_long.weight'.*no place"),
        ("llama", {"extra": {"rope_freqs.weight": np.ones(11, "f4")}}, r"has shape \(11,\), expected \(12,\)"),
        (
            "llama",
            {"extra": {"rope_freqs.weight": converters_factors(HEAD, 1e6, 8.0)}, "rope.scaling.factor": 2.0},
            "'llama.rope.scaling.factor' is 2.0, expected none beside the tensor 'rope_freqs.weight'",
        ),
        ("qwen2", {"rope.scaling.type": "yarn"}, "'qwen2.rope.scaling.type' is 'yarn', supported is only 'none' or"),
        ("gemma3", {"rope.scaling.factor": -8.0}, "'gemma3.rope.scaling.factor' is -8.0, expected a positive number"),
        ("gemma3", {"rope.freq_base": float("nan")}, "'gemma3.rope.freq_base' is nan, expected a positive number"),
        ("gemma2", {"rope.freq_base_swa": 5000.0}, "'gemma2.rope.freq_base_swa' is 5000.0"),
        ("qwen3", {"attention.sliding_window": 512}, "'qwen3.attention.sliding_window' is 512, supported is only 0"),
        ("olmo2", {"attention.sliding_window": 512}, "'olmo2.attention.sliding_window' is 512"),
        ("qwen3", {"expert_count": 64}, "'qwen3.expert_count' is 64, supported is only 0"),
        ("llama", {"logit_scale": 0.5}, "'llama.logit_scale' is 0.5"),
        ("gemma3", {"attention.value_length": 12}, "'gemma3.attention.value_length' is 12, supported is only 24"),
        ("phi3", {"rope.dimension_count": 18}, "'phi3.rope.dimension_count' is 18, supported is only 24"),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]},
            r"sliding_window_pattern' is \[True, False\], expected a period, or true or false for each of 7 layers",
        ),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": [1] * 7},
            "sliding_window_pattern' is .*, expected a period",
        ),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": "all"},
            "'gemma3.attention.sliding_window_pattern' is 'all', expected list",
        ),
        ("gemma2", {"block_count": 2**32 - 1}, "'gemma2.block_count' is 4294967295, but the file holds only 35"),
    ],
)  # fmt: skip
def test_it_is_refused(name, changes, message, model):
    with pytest.raises(UserError, match=message) as caught:
        gguf_to_huggingface(model(name, **changes))
    assert "m.gguf: " in str(caught.value)
