"""Turn a GGUF model into what Hugging Face would call it: a config and tensors under Hugging Face names."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spmd_distill.errors import UserError
from spmd_distill.interop.base import Entry, Weights
from spmd_distill.interop.gguf import GGUF
from spmd_distill.interop.names_architectures import ARCHITECTURES, Architecture, sizes_of
from spmd_distill.interop.names_config import ROPE_FACTORS, SAFETENSORS, read_config

_FLOAT32 = np.dtype(np.float32)


def gguf_to_huggingface(gguf: GGUF) -> tuple[dict[str, Any], Weights]:
    """Translate a GGUF model of the architectures llama, qwen2, qwen3, gemma2, gemma3 (text), phi3 and olmo2.

    Returns:
        The dict of a Hugging Face ``config.json``, and the weights under Hugging Face names, float32,
        row-major ``(out, in)``, with rows and norms as Hugging Face stores them. A weight is read when it is
        asked for.

    Raises:
        UserError: The architecture is not supported; metadata is missing, contradicts itself or asks for what the
            config cannot say; a tensor is missing, has another shape, or has no place in the architecture. Names
            the file, the thing found and expected.
    """
    architecture = gguf.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{gguf.path}: has architecture {architecture!r}, supported are "
            f"{', '.join(sorted(ARCHITECTURES))}. {SAFETENSORS}"
        )
    parts = gguf.get("split.count", int, 1)
    if parts > 1:
        raise UserError(
            f"{gguf.path}: is one of {parts} parts of a model, expected a whole one. "
            "Join them with `llama-gguf-split --merge`."
        )
    rules = ARCHITECTURES[architecture]
    config = read_config(gguf, architecture)
    entries: dict[str, Entry] = {}
    used = {ROPE_FACTORS} if rules.rope_factors else set()
    for place in _places(rules, config):
        _check_tensor(gguf, place)
        entries[place.name] = Entry(place.shape, _FLOAT32, partial(_read, gguf, place))
        used.add(place.stored)
    for stored in gguf.tensors:
        if stored not in used:
            raise UserError(
                f"{gguf.path}: holds tensor {stored!r} {gguf.tensors[stored].shape}, which has no place in a "
                f"plain {architecture!r} model; reading on without it would change the model. {SAFETENSORS}"
            )
    return config, Weights(str(gguf.path), entries)


@dataclass(frozen=True)
class _Place:
    """A tensor: its two names, its shape, and what llama.cpp's converter did to it."""

    name: str
    stored: str
    shape: tuple[int, ...]
    heads: int | None = None
    """Heads whose rows were interleaved."""
    offset: float = 0.0
    """What was added."""


def _places(rules: Architecture, config: dict[str, Any]) -> Iterator[_Place]:
    sizes, hidden, vocab = sizes_of(config), config["hidden_size"], config["vocab_size"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    yield _Place("model.embed_tokens.weight", "token_embd.weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        for name, (stored, shape) in rules.layer.items():
            yield _Place(
                f"model.layers.{layer}.{name}",
                f"blk.{layer}.{stored}",
                tuple(sizes[size] for size in shape),
                heads.get(name.split(".")[-2]) if rules.interleaved else None,
                rules.norm_offset if name.endswith("norm.weight") else 0.0,
            )
    yield _Place("model.norm.weight", "output_norm.weight", (hidden,), None, rules.norm_offset)
    if not config["tie_word_embeddings"]:
        yield _Place("lm_head.weight", "output.weight", (vocab, hidden))


def _check_tensor(gguf: GGUF, place: _Place) -> None:
    if place.stored not in gguf.tensors:
        raise UserError(
            f"{gguf.path}: tensor {place.stored!r} is missing, expected it with shape {place.shape}. "
            "The file is incomplete or its metadata belongs to another model: fetch or convert it again."
        )
    found = gguf.tensors[place.stored].shape
    if found != place.shape:
        raise UserError(
            f"{gguf.path}: tensor {place.stored!r} has shape {found}, expected {place.shape} from the metadata. "
            "The file is inconsistent: fetch or convert it again."
        )


def _read(gguf: GGUF, place: _Place) -> np.ndarray:
    weight = gguf.tensor(place.stored)
    if place.offset:
        with np.errstate(invalid="ignore"):  # what is not a number is the file's, not ours to warn about
            weight -= np.float32(place.offset)
    return weight if place.heads is None else unpermute(weight, place.heads)


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
