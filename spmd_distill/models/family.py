"""What the families' files share: reading and writing a Hugging Face config, and the names most of them use."""

from collections.abc import Mapping
from typing import Any

from spmd_distill.errors import UserError
from spmd_distill.models.config import DecoderConfig
from spmd_distill.models.naming import Rule, linear, per_head_in, per_head_out, per_head_vector, same, vocab_rows
from spmd_distill.models.rope import rope_from_huggingface, rope_to_huggingface

HuggingFace = Mapping[str, Any]
"""The content of a ``config.json``."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
"""Our name of an activation by Hugging Face's."""

THEIR_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
LOCAL, FULL = "sliding_attention", "full_attention"


def read_config(config: HuggingFace, family: str, *, tied: bool = False, **differences: Any) -> DecoderConfig:
    """The sizes that all families write alike, with the family's ``differences``; ``tied`` where the file is silent.

    Raises `UserError` for a key that is missing or a value that this library's decoder does not have.
    """
    where = f"{family} config"
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise UserError(
            f"{where}: hidden_act {activation!r} is not supported; expected one of {', '.join(ACTIVATIONS)}."
        )
    try:
        heads = config["num_attention_heads"]
        sizes: dict[str, Any] = {
            "vocab_size": config["vocab_size"],
            "width": config["hidden_size"],
            "layers": config["num_hidden_layers"],
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "mlp": config["intermediate_size"],
            "tied": bool(config.get("tie_word_embeddings", tied)),
            "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "max_length": config.get("max_position_embeddings", 2048),
            "activation": ACTIVATIONS[activation],
            "family": family,
        }
    except KeyError as error:
        raise UserError(f"{where}: the key {error} is missing.") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: a size cannot be read ({error}).") from error
    if "rope" not in differences:
        sizes["rope"] = rope_from_huggingface(config, FULL, where)
    try:
        return DecoderConfig(**sizes | differences)
    except TypeError as error:
        raise UserError(f"{where}: a size is not a number ({error}).") from error


def refuse(config: HuggingFace, family: str, **expected: Any) -> None:
    """Raise `UserError` where ``config`` has another value than expected; a key that is not there is as expected."""
    for key, value in expected.items():
        found = config.get(key)
        if found is not None and found != value:
            raise UserError(f"{family} config: {key}: {found!r} is not supported; expected {value!r}.")


def local_layers(config: HuggingFace, family: str, pattern: tuple[bool, ...] | None = None) -> tuple[bool, ...] | None:
    """Which layers have a window: by ``layer_types``, or else by ``pattern``, repeated; None where it is not said."""
    types = config.get("layer_types")
    if types is None:
        depth = config.get("num_hidden_layers", 0)
        return None if pattern is None else tuple(pattern[i % len(pattern)] for i in range(depth))
    if unknown := [t for t in types if t not in (LOCAL, FULL)]:
        raise UserError(
            f"{family} config: layer_types names {unknown[0]!r}, which is not supported; expected {LOCAL} or {FULL}."
        )
    return tuple(t == LOCAL for t in types)


def write_config(
    config: DecoderConfig, architecture: str, model_type: str, original: HuggingFace | None = None, **differences: Any
) -> dict[str, Any]:
    """A ``config.json``; ids of special tokens and the like are taken over from ``original``.

    Rotary positions are written as ``rope_theta`` and ``rope_scaling``, which every release reads.
    """
    kept = {k: v for k, v in (original or {}).items() if k not in ("rope_parameters", "layer_types")}
    written = {
        **kept,
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.tokens,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_to_huggingface(config.rope),
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_length,
        "hidden_act": THEIR_ACTIVATIONS[config.activation],
    }
    if config.rope.fraction != 1:
        written["partial_rotary_factor"] = config.rope.fraction
    return written | differences


def write_layer_types(config: DecoderConfig) -> list[str]:
    """``layer_types`` of a family that tells its layers apart."""
    return [LOCAL if local else FULL for local in config.is_local]


def llama_rules(config: DecoderConfig) -> dict[str, Rule]:
    """Our parameter path -> its name in a Llama-like checkpoint (``{}`` is the layer) and how the shape is turned."""
    layer = "model.layers.{}."
    attention = layer + "self_attn."
    table = {
        "embed": Rule("model.embed_tokens.weight", vocab_rows(config.vocab_size, config.padded_vocab)),
        "norm.scale": Rule("model.norm.weight", same()),
        "layers.attention.q": Rule(attention + "q_proj.weight", per_head_out(config.heads)),
        "layers.attention.k": Rule(attention + "k_proj.weight", per_head_out(config.kv_heads)),
        "layers.attention.v": Rule(attention + "v_proj.weight", per_head_out(config.kv_heads)),
        "layers.attention.o": Rule(attention + "o_proj.weight", per_head_in(config.heads)),
        "layers.mlp.gate": Rule(layer + "mlp.gate_proj.weight", linear()),
        "layers.mlp.up": Rule(layer + "mlp.up_proj.weight", linear()),
        "layers.mlp.down": Rule(layer + "mlp.down_proj.weight", linear()),
    }
    if not config.tied:
        table["unembed"] = Rule("lm_head.weight", vocab_rows(config.vocab_size, config.padded_vocab))
    if config.qkv_bias:
        for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            table[f"layers.attention.{name}_bias"] = Rule(f"{attention}{name}_proj.bias", per_head_vector(heads))
    if config.qk_norm != "none":
        for name, heads in (("q", config.heads), ("k", config.kv_heads)):
            turn = per_head_vector(heads) if config.qk_norm == "all" else same()
            table[f"layers.attention.{name}_norm.scale"] = Rule(f"{attention}{name}_norm.weight", turn)
    names = {
        "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
        "after": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
        "both": {
            "attention_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    }[config.norms]
    for ours, theirs in names.items():
        table[f"layers.{ours}.scale"] = Rule(f"{layer}{theirs}.weight", same())
    return table
