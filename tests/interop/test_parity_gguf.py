"""GGUF models of other architectures, against transformers: as another reader, and as the models themselves."""

import numpy as np
import pytest
from llama_files import write_gguf
from test_gguf_architectures import (
    COUNT,
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MLP,
    VOCAB,
    converted,
    converters_factors,
    pairs,
)

from spmd_distill.interop import gguf_to_huggingface, open_gguf, save_huggingface

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]  # their warnings are theirs

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MODELS = {
    "llama": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}}, {}),
    "qwen2": ({"tie_word_embeddings": True}, {}),
    "qwen3": ({}, {}),
    "gemma2": (
        {"sliding_window": 6, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        {"sliding_window": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5e3},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 5e3},
    ),
    "phi3": ({"sliding_window": None, "pad_token_id": 0}, {}),
    "olmo2": ({}, {}),
}
KEYS = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps vocab_size
    max_position_embeddings tie_word_embeddings pad_token_id
""".split()  # noqa: SIM905
"""Settings of the original, and what llama.cpp's converter writes of them beside the usual."""


def original(name: str, head: int = HEAD):
    """A transformers model with every parameter random, norms and biases too, and scores large enough to matter."""
    settings = dict(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=COUNT.get(name, 2),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=head,
        max_position_embeddings=16384,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        query_pre_attn_scalar=head,
        tie_word_embeddings=name.startswith("gemma"),
        attn_implementation="eager",
    )
    if not name.startswith("gemma"):
        del settings["query_pre_attn_scalar"]
    if name in ("phi3", "olmo2"):  # which know no head size
        settings["head_dim"] = HIDDEN // HEADS
    kind = "gemma3_text" if name == "gemma3" else name
    config = transformers.AutoConfig.for_model(kind, **settings | MODELS[name][0])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.2))
    return model


def as_gguf(name: str, model, path, kind: str = "F32", **more):
    """What llama.cpp's converter would write."""
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    head = getattr(model.config, "head_dim", HIDDEN // HEADS)
    changes = {
        "context_length": 16384,
        "attention.head_count": model.config.num_attention_heads,
        "attention.head_count_kv": model.config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.sliding_window": getattr(model.config, "sliding_window", None),
    }
    tensors = converted(name, state, head)
    if name == "llama":
        tensors["rope_freqs.weight"] = converters_factors(head, 1e6, 8.0)
    return write_gguf(path, tensors, pairs(name, **changes, **MODELS[name][1]) | more, kind, name)


def logits(model) -> np.ndarray:
    tokens = torch.tensor(np.random.default_rng(0).integers(0, VOCAB, size=(2, 40)))
    positions = torch.arange(40)[None].repeat(2, 1) * 100  # far apart: the scaling of the frequencies shows
    with torch.no_grad():
        return model(tokens, position_ids=positions).logits.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_through_gguf_computes_the_same(name, tmp_path):
    model = original(name)
    path = as_gguf(name, model, tmp_path / "m.gguf")
    folder = save_huggingface(tmp_path / "ours", *gguf_to_huggingface(open_gguf(path)))
    ours, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )

    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert type(ours) is type(model)
    expected = logits(model)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(logits(ours.eval()), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gemma3", "phi3"])
def test_transformers_reads_the_same_from_the_same_file(name, tmp_path):
    """Their reader knows nothing of ours. What it has no place for (windows, scaling, caps) is not compared."""
    pytest.importorskip("accelerate")
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{n}" for n in range(VOCAB)]}
    vocabulary |= {"tokenizer.ggml.merges": ["t 1"], "tokenizer.ggml.padding_token_id": 2, f"{name}.vocab_size": VOCAB}
    model = original(name, head=HIDDEN // HEADS)  # the only one that they can read of every architecture
    path = as_gguf(name, model, tmp_path / "m.gguf", "Q8_0", **vocabulary)
    config, found = gguf_to_huggingface(open_gguf(path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    settings = theirs.config.to_dict()
    for key in KEYS:
        assert settings[key] == pytest.approx(config[key]), key
    theta = settings["rope_parameters"]
    assert theta.get("full_attention", theta)["rope_theta"] == config["rope_theta"]
    state = theirs.state_dict()
    assert set(state) == set(found) | ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    for key, value in found.items():
        assert np.array_equal(state[key].numpy(), value), key
