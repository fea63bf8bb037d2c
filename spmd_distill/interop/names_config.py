"""From the metadata of a GGUF file to the dict of a Hugging Face ``config.json``.

Keys and defaults are those of llama.cpp, which reads the same files. Everything that the metadata can ask for and the
config could not express is refused: ignoring it would be another model.
"""

import math
from typing import Any

import numpy as np

from spmd_distill.errors import UserError
from spmd_distill.interop.gguf import GGUF
from spmd_distill.interop.names_architectures import ARCHITECTURES

ROPE_FACTORS = "rope_freqs.weight"
"""Optional tensor ``(head_dim / 2,)``: what each rotary frequency is divided by."""
SAFETENSORS = "Give the model's Hugging Face folder (safetensors) instead."
_AGAIN = "The metadata is damaged: fetch or convert it again."
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_config(gguf: GGUF, architecture: str) -> dict[str, Any]:
    """Return the config of a model of one of `ARCHITECTURES`, with ``rope_theta`` and ``rope_scaling``.

    Raises `UserError` for a key that is missing, of another type, out of range or asks for what the config cannot
    say.
    """
    rules = ARCHITECTURES[architecture]
    keys = _Keys(gguf, architecture)
    hidden, heads = keys.positive("embedding_length"), keys.positive("attention.head_count")
    kv_heads = keys.positive("attention.head_count_kv", heads)
    head_dim = keys.positive("attention.key_length", hidden // heads)
    _refuse_variants(keys, head_dim, local=architecture in _LOCAL)
    if heads % kv_heads or head_dim % 2:
        raise UserError(
            f"{gguf.path}: has {heads} heads, {kv_heads} key-value heads and head size {head_dim}, expected "
            f"the first to be a multiple of the second and an even head size. {_AGAIN}"
        )
    layers = keys.positive("block_count")
    if layers > len(gguf.tensors):
        raise keys.refuse("block_count", layers, f"but the file holds only {len(gguf.tensors)} tensors", _AGAIN)
    theta = keys.number("rope.freq_base", 10000.0)
    rows = gguf.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in gguf.tensors else 1
    config: dict[str, Any] = {
        "architectures": [rules.name],
        "model_type": rules.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys.positive("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(keys, head_dim, theta, rules.rope_factors),
        "max_position_embeddings": keys.positive("context_length"),
        "vocab_size": keys.positive("vocab_size", rows),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "float32",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = gguf.get(f"tokenizer.ggml.{key}_token_id", int, None)
    return config | _OWN[architecture](keys, config)


class _Keys:
    """Metadata of one architecture, its name put before every key."""

    def __init__(self, gguf: GGUF, architecture: str):
        self.gguf = gguf
        self.architecture = architecture

    def get(self, key: str, kind: type, *default: Any) -> Any:
        return self.gguf.get(f"{self.architecture}.{key}", kind, *default)

    def refuse(self, key: str, found: Any, expected: str, fix: str = SAFETENSORS) -> UserError:
        path = self.gguf.path
        return UserError(f"{path}: metadata '{self.architecture}.{key}' is {found!r}, {expected}. {fix}")

    def positive(self, key: str, *default: int) -> int:
        value = self.get(key, int, *default)
        if value < 1:
            raise self.refuse(key, value, "expected 1 or more", "Fetch or convert it again.")
        return value

    def number(self, key: str, *default: float) -> float:
        """A positive float32, as the shortest decimal: 9.999999747378752e-06 was written as 1e-05."""
        value = self.get(key, float, *default)
        if not 0 < value < math.inf:
            raise self.refuse(key, value, "expected a positive number", "Fetch or convert it again.")
        return float(str(np.float32(value)))


def _refuse_variants(keys: _Keys, head_dim: int, local: bool) -> None:
    """Refuse what GGUF's architectures also cover and what would silently be another model here."""
    allowed: dict[str, tuple[Any, ...]] = {
        "expert_count": (0,),
        "nextn_predict_layers": (0,),
        "rope.dimension_count": (head_dim,),
        "rope.scale_linear": (1.0,),
        "attention.value_length": (head_dim,),
        "attention.key_length_swa": (head_dim,),
        "attention.causal": (True,),
        "attention.scale": (0.0,),
        "attention.clamp_kqv": (0.0,),
        "logit_scale": (0.0, 1.0),
        "residual_scale": (0.0, 1.0),
        "embedding_scale": (0.0, 1.0),
    }
    if not local:
        allowed["attention.sliding_window"] = (0,)
    for key, values in allowed.items():
        found = keys.get(key, type(values[0]), values[0])
        if found not in values:
            raise keys.refuse(key, found, f"supported is only {values[0]!r}")


def _rope_scaling(keys: _Keys, head_dim: int, theta: float, factors: bool) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", str, "linear")  # llama.cpp's default, with factor 1
    factor = keys.get("rope.scaling.factor", float, 1.0) or 1.0
    if kind not in ("none", "linear"):
        raise keys.refuse("rope.scaling.type", kind, "supported is only 'none' or 'linear'")
    if not 0 < factor < math.inf:
        raise keys.refuse("rope.scaling.factor", factor, "expected a positive number", "Fetch or convert it again.")
    linear = {"rope_type": "linear", "factor": float(str(np.float32(factor)))} if kind == "linear" else None
    linear = None if factor == 1 else linear
    if not factors or ROPE_FACTORS not in keys.gguf.tensors:
        return linear
    llama3 = _llama3_scaling(keys.gguf, head_dim, theta)
    if linear and llama3:
        raise keys.refuse("rope.scaling.factor", factor, f"expected none beside the tensor {ROPE_FACTORS!r}")
    return llama3 or linear


def _llama3_scaling(gguf: GGUF, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Recognise the factors that Llama 3.1 and later divide their frequencies by."""
    shape = gguf.tensors[ROPE_FACTORS].shape
    if shape != (head_dim // 2,):
        raise UserError(
            f"{gguf.path}: tensor {ROPE_FACTORS!r} has shape {shape}, expected {(head_dim // 2,)}. {_AGAIN}"
        )
    found = gguf.tensor(ROPE_FACTORS)
    if (found == 1).all():
        return None
    factor = float(str(found.max()))
    if not 1 < factor < math.inf or not np.allclose(found, llama3_factors(head_dim, theta, factor), rtol=1e-4, atol=0):
        raise UserError(
            f"{gguf.path}: tensor {ROPE_FACTORS!r} divides the rotary frequencies by {found.min():.4g} to "
            f"{found.max():.4g} in another way than Llama 3 (low_freq_factor 1, high_freq_factor 4, 8192 positions). "
            f"{SAFETENSORS}"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """Return what Llama 3 divides each frequency by, float64 ``[head_dim / 2]``.

    Waves of more than 8192 positions are made ``factor`` times longer, those of less than 8192 / 4 are kept, and
    between them the frequency is interpolated linearly in the number of waves.
    """
    positions = _LLAMA3["original_max_position_embeddings"]
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    waves = positions * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    kept = np.clip((waves - low) / (high - low), 0, 1)
    return 1 / (kept + (1 - kept) / factor)


def _llama(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": False, "mlp_bias": False}


def _qwen2(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": False, "use_sliding_window": False}


def _olmo2(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": False}


def _phi3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.get("attention.sliding_window", int, 0)
    original = keys.positive("rope.scaling.original_context_length", config["max_position_embeddings"])
    own = {"attention_bias": False, "original_max_position_embeddings": original, "sliding_window": window or None}
    return own | ({"layer_types": ["sliding_attention"] * config["num_hidden_layers"]} if window else {})


def _gemma2(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.get("rope.freq_base_swa", float, config["rope_theta"]) != config["rope_theta"]:
        raise keys.refuse("rope.freq_base_swa", keys.get("rope.freq_base_swa", float), "expected 'rope.freq_base'")
    own = {
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }
    return own | _gemma(keys, config, window=4096, period=2, layers_of_27b=46)


def _gemma3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    final = keys.get("final_logit_softcapping", float, 0.0)
    own = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.number("final_logit_softcapping") if final else None,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }
    return own | _gemma(keys, config, window=0, period=6, layers_of_27b=62)


def _gemma(keys: _Keys, config: dict[str, Any], window: int, period: int, layers_of_27b: int) -> dict[str, Any]:
    """``window`` and ``period`` are llama.cpp's, for a file that does not say."""
    layers = config["num_hidden_layers"]
    window = keys.get("attention.sliding_window", int, window)
    wide = config["hidden_size"] // config["num_attention_heads"]  # only the models of 27B scale scores by this
    return {
        "attention_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": wide if layers == layers_of_27b else config["head_dim"],
        "sliding_window": window or None,
        "layer_types": _layer_types(keys, layers, period) if window else ["full_attention"] * layers,
    }


def _layer_types(keys: _Keys, layers: int, period: int) -> list[str]:
    """The last layer of every ``period`` attends to everything; the file may have another period or a list."""
    key = "attention.sliding_window_pattern"
    given = keys.gguf.metadata.get(f"{keys.architecture}.{key}", period)
    if type(given) is int and given >= 0:
        local = [given == 0 or layer % given < given - 1 for layer in range(layers)]
    else:
        local = keys.get(key, list)
        if len(local) != layers or not {type(flag) for flag in local} <= {bool}:
            raise keys.refuse(key, local[:8], f"expected a period, or true or false for each of {layers} layers")
    return ["sliding_attention" if flag else "full_attention" for flag in local]


_LOCAL = {"gemma2", "gemma3", "phi3"}
_OWN = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
}
