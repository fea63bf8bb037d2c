"""A small config of every family, as its ``config.json`` would say it, with everything on that the family has."""

from typing import Any

SIZES = {
    "vocab_size": 131, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "max_position_embeddings": 64, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 3.0]}
LOCAL, FULL = "sliding_attention", "full_attention"


def config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return SIZES | {"architectures": [architecture], "model_type": model_type} | more


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": config("LlamaForCausalLM", "llama", attention_bias=False, mlp_bias=False),
    "llama3": config("LlamaForCausalLM", "llama", rope_scaling=LLAMA3, tie_word_embeddings=True, rope_theta=5e5),
    "llama-linear": config("LlamaForCausalLM", "llama", rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "smollm2": config("LlamaForCausalLM", "llama", tie_word_embeddings=True, num_attention_heads=9),
    "mistral": config("MistralForCausalLM", "mistral", sliding_window=5),
    "qwen2": config("Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True),
    "qwen2-yarn": config("Qwen2ForCausalLM", "qwen2", rope_scaling=YARN),
    "qwen2-window": config(
        "Qwen2ForCausalLM", "qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1,
    ),
    "qwen3": config("Qwen3ForCausalLM", "qwen3", head_dim=10, attention_bias=False),
    "gemma2": config(
        "Gemma2ForCausalLM", "gemma2", sliding_window=5, query_pre_attn_scalar=12, tie_word_embeddings=True,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0, hidden_activation="gelu_pytorch_tanh",
        hidden_act="gelu_pytorch_tanh",
    ),
    "gemma3": config(
        "Gemma3ForCausalLM", "gemma3_text", sliding_window=5, query_pre_attn_scalar=12, tie_word_embeddings=True,
        hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh", rope_theta=1e6, rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 4.0}, layer_types=[LOCAL, FULL, LOCAL],
    ),
    "olmo2": config("Olmo2ForCausalLM", "olmo2", attention_bias=False),
    "phi3": config("Phi3ForCausalLM", "phi3", head_dim=6, sliding_window=5),
    "phi3-long": config(
        "Phi3ForCausalLM", "phi3", head_dim=6, rope_scaling=LONG, original_max_position_embeddings=16,
        sliding_window=None,
    ),
    "phi4": config("Phi3ForCausalLM", "phi3", hidden_size=48, partial_rotary_factor=0.5, sliding_window=None),
}  # fmt: skip
