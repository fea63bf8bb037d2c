"""Small model files for the tests of this folder, written by other people's writers."""

from pathlib import Path

import gguf
import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "vocab_size": 40,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
HEADS_OF = {"attn_q": 4, "attn_k": 2}
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PAIRS = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-05,
    "llama.vocab_size": 40,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
}


def llama_weights(seed: int = 0, tied: bool = True) -> dict[str, np.ndarray]:
    """Return random float32 weights of `CONFIG` under Hugging Face names."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (40, 64)}
    for layer in range(2):
        name = f"model.layers.{layer}."
        shapes |= {
            name + "input_layernorm.weight": (64,),
            name + "self_attn.q_proj.weight": (64, 64),
            name + "self_attn.k_proj.weight": (32, 64),
            name + "self_attn.v_proj.weight": (32, 64),
            name + "self_attn.o_proj.weight": (64, 64),
            name + "post_attention_layernorm.weight": (64,),
            name + "mlp.gate_proj.weight": (96, 64),
            name + "mlp.up_proj.weight": (96, 64),
            name + "mlp.down_proj.weight": (64, 96),
        }
    shapes["model.norm.weight"] = (64,)
    if not tied:
        shapes["lm_head.weight"] = (40, 64)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of q or k as llama.cpp does: in a head, the pair (i, i + half) goes to (2i, 2i + 1)."""
    half = len(weight) // heads // 2
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(half):
            first = head * 2 * half
            out[first + 2 * i] = weight[first + i]
            out[first + 2 * i + 1] = weight[first + i + half]
    return out


def llama_tensors(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename and interleave Hugging Face weights as llama.cpp's converter does."""
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    tensors = {}
    for name, weight in weights.items():
        if name in plain:
            tensors[plain[name]] = weight
            continue
        layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        part = GGUF_NAMES[part]
        tensors[f"blk.{layer}.{part}.weight"] = interleave(weight, HEADS_OF[part]) if part in HEADS_OF else weight
    return tensors


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    pairs: dict[str, object] | None = None,
    kind: str = "F32",
    architecture: str = "llama",
) -> Path:
    """Write a GGUF file with the `gguf` package; matrices are quantised to ``kind``."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (pairs or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        code = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(array, code), raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
