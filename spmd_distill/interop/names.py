"""Turn a GGUF model into what Hugging Face would call it: a config and tensors under Hugging Face names.

llama.cpp turns neighbouring pairs of a head's channels (2i, 2i + 1), Hugging Face turns channel i with
channel i + head_dim / 2. So llama.cpp's converter interleaves the rows of q and k, head by head, and the
reader undoes it. A model read without that still writes almost sensible text; only its logits tell.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from spmd_distill.errors import UserError
from spmd_distill.interop.base import Entry, Weights
from spmd_distill.interop.gguf import GGUF

_FLOAT32 = np.dtype(np.float32)
_SAFETENSORS = "Give the model's Hugging Face folder (safetensors) instead."


def gguf_to_huggingface(gguf: GGUF) -> tuple[dict[str, Any], Weights]:
    """Translate a GGUF model.

    Returns:
        The dict of a Hugging Face ``config.json``, and the weights under Hugging Face names, float32,
        row-major ``(out, in)``, with the rows of q and k in Hugging Face's order. A weight is read when it is
        asked for.

    Raises:
        UserError: The architecture is not supported; metadata is missing or contradicts itself; a tensor is
            missing, has another shape, or has no place in the architecture. Names the file, the thing found
            and expected.
    """
    architecture = gguf.get("general.architecture", str)
    if architecture not in _ARCHITECTURES:
        raise UserError(
            f"{gguf.path}: has architecture {architecture!r}, supported are "
            f"{', '.join(sorted(_ARCHITECTURES))}. {_SAFETENSORS}"
        )
    parts = gguf.get("split.count", int, 1)
    if parts > 1:
        raise UserError(
            f"{gguf.path}: is one of {parts} parts of a model, expected a whole one. "
            "Join them with `llama-gguf-split --merge`."
        )
    config_of, names_of = _ARCHITECTURES[architecture]
    config = config_of(gguf)
    entries: dict[str, Entry] = {}
    used = set()
    for name, stored, shape, heads in names_of(config):
        _check_tensor(gguf, stored, shape)
        entries[name] = Entry(shape, _FLOAT32, _reader(gguf, stored, heads))
        used.add(stored)
    for stored in gguf.tensors:
        if stored not in used:
            raise UserError(
                f"{gguf.path}: holds tensor {stored!r} {gguf.tensors[stored].shape}, which has no place in a "
                f"plain {architecture!r} model; reading on without it would change the model. {_SAFETENSORS}"
            )
    return config, Weights(str(gguf.path), entries)


def _check_tensor(gguf: GGUF, stored: str, shape: tuple[int, ...]) -> None:
    if stored not in gguf.tensors:
        raise UserError(
            f"{gguf.path}: tensor {stored!r} is missing, expected it with shape {shape}. "
            "The file is incomplete or its metadata belongs to another model: fetch or convert it again."
        )
    found = gguf.tensors[stored].shape
    if found != shape:
        raise UserError(
            f"{gguf.path}: tensor {stored!r} has shape {found}, expected {shape} from the metadata. "
            "The file is inconsistent: fetch or convert it again."
        )


def _reader(gguf: GGUF, stored: str, heads: int | None) -> Callable[[], np.ndarray]:
    if heads is None:
        return lambda: gguf.tensor(stored)
    return lambda: unpermute(gguf.tensor(stored), heads)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the rows of q or k.

    Args:
        weight: ``(heads * head_dim, in)``; the rows of a head are channels 0, h, 1, h + 1, ... with h =
        head_dim / 2.
        heads: Query heads for q, key-value heads for k.

    Returns:
        A new array of the same shape; the rows of a head are channels 0, 1, ... head_dim - 1.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _llama_config(gguf: GGUF) -> dict[str, Any]:
    hidden = _positive(gguf, "llama.embedding_length")
    heads = _positive(gguf, "llama.attention.head_count")
    kv_heads = _positive(gguf, "llama.attention.head_count_kv", heads)
    head_dim = _positive(gguf, "llama.attention.key_length", hidden // heads)
    _refuse_variants(gguf, head_dim)
    if heads % kv_heads or head_dim % 2:
        raise UserError(
            f"{gguf.path}: has {heads} heads, {kv_heads} key-value heads and head size {head_dim}, expected "
            "the first to be a multiple of the second and an even head size. The metadata is damaged: fetch "
            "or convert it again."
        )
    rows = gguf.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in gguf.tensors else 1
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _positive(gguf, "llama.feed_forward_length"),
        "num_hidden_layers": _positive(gguf, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(gguf.get("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(gguf.get("llama.rope.freq_base", float, 10000.0)),
        "rope_scaling": None,
        "max_position_embeddings": _positive(gguf, "llama.context_length"),
        "vocab_size": _positive(gguf, "llama.vocab_size", rows),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = gguf.get(f"tokenizer.ggml.{key}_token_id", int, None)
    return config


def _refuse_variants(gguf: GGUF, head_dim: int) -> None:
    """Refuse what GGUF's llama architecture also covers and what would silently be another model here."""
    expected: dict[str, Any] = {
        "llama.expert_count": 0,
        "llama.rope.dimension_count": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.rope.scaling.type": "none",
        "llama.rope.scale_linear": 1.0,
        "llama.attention.sliding_window": 0,
        "llama.attention.causal": True,
    }
    for key, value in expected.items():
        found = gguf.get(key, type(value), value)
        if found != value:
            raise UserError(f"{gguf.path}: metadata {key!r} is {found!r}, supported is only {value!r}. {_SAFETENSORS}")


def _llama_names(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], int | None]]:
    """Yield (Hugging Face name, GGUF name, shape, heads to un-permute by) of every tensor."""
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q_rows, kv_rows = heads * config["head_dim"], kv_heads * config["head_dim"]
    yield "model.embed_tokens.weight", "token_embd.weight", (vocab, hidden), None
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        yield ours + "input_layernorm.weight", theirs + "attn_norm.weight", (hidden,), None
        yield ours + "self_attn.q_proj.weight", theirs + "attn_q.weight", (q_rows, hidden), heads
        yield ours + "self_attn.k_proj.weight", theirs + "attn_k.weight", (kv_rows, hidden), kv_heads
        yield ours + "self_attn.v_proj.weight", theirs + "attn_v.weight", (kv_rows, hidden), None
        yield ours + "self_attn.o_proj.weight", theirs + "attn_output.weight", (hidden, q_rows), None
        yield ours + "post_attention_layernorm.weight", theirs + "ffn_norm.weight", (hidden,), None
        yield ours + "mlp.gate_proj.weight", theirs + "ffn_gate.weight", (mlp, hidden), None
        yield ours + "mlp.up_proj.weight", theirs + "ffn_up.weight", (mlp, hidden), None
        yield ours + "mlp.down_proj.weight", theirs + "ffn_down.weight", (hidden, mlp), None
    yield "model.norm.weight", "output_norm.weight", (hidden,), None
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", "output.weight", (vocab, hidden), None


_ARCHITECTURES = {"llama": (_llama_config, _llama_names)}


def _positive(gguf: GGUF, key: str, default: int | None = None) -> int:
    value = gguf.get(key, int) if default is None else gguf.get(key, int, default)
    if value < 1:
        raise UserError(f"{gguf.path}: metadata {key!r} is {value}, expected 1 or more. Fetch or convert it again.")
    return value


def _shortest(value: float) -> float:
    """Undo the widening of a stored float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
