"""What GGUF calls the tensors of each architecture, and what Hugging Face calls them.

A layer is a table: Hugging Face name -> GGUF name and shape, the shape in named sizes (`sizes_of`). Two things beside
the names differ, by architecture. llama.cpp turns neighbouring pairs of a llama head's channels (2i, 2i + 1), Hugging
Face turns channel i with channel i + head_dim / 2; so llama.cpp's converter interleaves the rows of q and k, head by
head (``interleaved``), and leaves those of every other architecture here alone. And Gemma multiplies by one plus the
weight of a norm: Hugging Face stores the weight, llama.cpp's converter the sum (``norm_offset``). A model read without
undoing either still writes almost sensible text; only its logits tell.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_Layer = Mapping[str, tuple[str, tuple[str, ...]]]


@dataclass(frozen=True)
class Architecture:
    """One value of ``general.architecture``."""

    name: str
    """The Hugging Face class, such as ``LlamaForCausalLM``."""
    model_type: str
    """Hugging Face's short name."""
    layer: _Layer
    """Names and shapes of the tensors of a layer."""
    interleaved: bool = False
    norm_offset: float = 0.0
    rope_factors: bool = False
    """May hold a tensor that divides the rotary frequencies, as Llama 3 needs."""


_NORMS: _Layer = {
    "input_layernorm.weight": ("attn_norm.weight", ("hidden",)),
    "post_attention_layernorm.weight": ("ffn_norm.weight", ("hidden",)),
}
_ATTENTION: _Layer = {
    "self_attn.q_proj.weight": ("attn_q.weight", ("q", "hidden")),
    "self_attn.k_proj.weight": ("attn_k.weight", ("kv", "hidden")),
    "self_attn.v_proj.weight": ("attn_v.weight", ("kv", "hidden")),
    "self_attn.o_proj.weight": ("attn_output.weight", ("hidden", "q")),
}
_MLP: _Layer = {
    "mlp.gate_proj.weight": ("ffn_gate.weight", ("mlp", "hidden")),
    "mlp.up_proj.weight": ("ffn_up.weight", ("mlp", "hidden")),
    "mlp.down_proj.weight": ("ffn_down.weight", ("hidden", "mlp")),
}
_BIASES: _Layer = {
    "self_attn.q_proj.bias": ("attn_q.bias", ("q",)),
    "self_attn.k_proj.bias": ("attn_k.bias", ("kv",)),
    "self_attn.v_proj.bias": ("attn_v.bias", ("kv",)),
}
_HEAD_NORMS: _Layer = {
    "self_attn.q_norm.weight": ("attn_q_norm.weight", ("head",)),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", ("head",)),
}
_WIDE_NORMS: _Layer = {
    "self_attn.q_norm.weight": ("attn_q_norm.weight", ("q",)),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", ("kv",)),
}
_AFTER_NORMS: _Layer = {
    "post_attention_layernorm.weight": ("post_attention_norm.weight", ("hidden",)),
    "post_feedforward_layernorm.weight": ("post_ffw_norm.weight", ("hidden",)),
}
_AROUND_NORMS: _Layer = {
    "input_layernorm.weight": ("attn_norm.weight", ("hidden",)),
    "pre_feedforward_layernorm.weight": ("ffn_norm.weight", ("hidden",)),
    **_AFTER_NORMS,
}
_FUSED: _Layer = {
    "self_attn.qkv_proj.weight": ("attn_qkv.weight", ("qkv", "hidden")),
    "self_attn.o_proj.weight": ("attn_output.weight", ("hidden", "q")),
    "mlp.gate_up_proj.weight": ("ffn_up.weight", ("gate_up", "hidden")),
    "mlp.down_proj.weight": ("ffn_down.weight", ("hidden", "mlp")),
}

_PLAIN = {**_NORMS, **_ATTENTION, **_MLP}
_GEMMA = {**_AROUND_NORMS, **_ATTENTION, **_MLP}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", _PLAIN, interleaved=True, rope_factors=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", {**_PLAIN, **_BIASES}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", {**_PLAIN, **_HEAD_NORMS}),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _GEMMA, norm_offset=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", {**_GEMMA, **_HEAD_NORMS}, norm_offset=1.0),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", {**_NORMS, **_FUSED}),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", {**_AFTER_NORMS, **_WIDE_NORMS, **_ATTENTION, **_MLP}),
}
"""What can be read, by GGUF's ``general.architecture``. Mistral is a ``llama`` there."""


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that the tables name, from a Hugging Face config."""
    head, mlp = config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    hidden = config["hidden_size"]
    return {"hidden": hidden, "mlp": mlp, "gate_up": 2 * mlp, "head": head, "q": q, "kv": kv, "qkv": q + 2 * kv}
