"""A random checkpoint of every family as somebody else would have written it, with a tokenizer and its odd files."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spmd_distill.interop import TextTokenizer
from spmd_distill.models import FAMILIES, decoder
from spmd_distill.models.base import path_name

SIZES = {
    "vocab_size": 261, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 1, "use_cache": True,
}  # fmt: skip
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
ODD_FILES = {
    "special_tokens_map.json": b'{"eos_token":"</s>"}',
    "added_tokens.json": b'{ "<s>": 0 }\n\n',
    "chat_template.jinja": "{% for m in messages %}{{ m.content }}\u00e9</s>{% endfor %}\r\n".encode(),
    "vocab.json": b"{}",
    "merges.txt": b"#version: 0.2\n",
    "tokenizer.model": bytes(range(256)),
    "generation_config.json": b'{"temperature":0.6,   "eos_token_id": [1, 2]}',
}
"""Files that no tool would write just so."""
CARD = "---\nlicense: mit\nbase_model: somebody/else\n---\n# A model\n"


def config_of(architecture: str, **more: Any) -> dict[str, Any]:
    """A small ``config.json`` of a family; what it has beyond `SIZES` is its own default."""
    family, given = FAMILIES[architecture], SIZES | {"architectures": [architecture]} | more
    return family.config_to_huggingface(family.config_from_huggingface(given), given)


def weights_of(config: dict[str, Any], dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors under the names of the family."""
    family = FAMILIES[config["architectures"][0]]
    model = decoder(family.config_from_huggingface(config))
    rules, shapes = family.rules(model.config), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.abstract):
        rule = rules[path_name(path)]
        for i in range(leaf.shape[0]) if "{}" in rule.name else (0,):
            shapes[rule.name.format(i)] = rule.theirs(leaf.shape[1:] if "{}" in rule.name else leaf.shape)
    r = np.random.default_rng(seed)
    return {name: (0.3 * r.normal(size=shape)).astype(dtype) for name, shape in sorted(shapes.items())}


def byte_tokenizer() -> TextTokenizer:
    """One token a byte, and two special ones: 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return TextTokenizer(tokenizer, {"bos": "<s>", "eos": "</s>", "pad": "</s>"})


def write_checkpoint(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    dtype: str = "float32",
    odd: bool = True,
    **more: Any,
) -> dict[str, np.ndarray]:
    """Write a folder with the tools of others, with `ODD_FILES` or without; return its tensors."""
    config = config_of(architecture, torch_dtype=dtype, **more)
    weights = weights_of(config, DTYPES[dtype])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    (folder / "README.md").write_text(CARD)
    byte_tokenizer().save(folder)
    for name, content in ODD_FILES.items() if odd else ():
        (folder / name).write_bytes(content)
    write_weights(folder, weights)
    return weights


def write_weights(folder: Path, weights: dict[str, np.ndarray], shards: int = 1) -> None:
    """Write the weights alone, over those that are there."""
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, places = sorted(weights), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({n: weights[n] for n in names[i::shards]}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names[i::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read without us."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name
