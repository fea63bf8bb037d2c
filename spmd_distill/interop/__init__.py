"""Models, weights and tokenizers of other tools, in and out: Hugging Face folders and GGUF files."""

from spmd_distill.interop.base import MissingTensorError, Weights
from spmd_distill.interop.card import ModelCard, read_front_matter
from spmd_distill.interop.export import CARD, TOKENIZER_FILES, save_huggingface
from spmd_distill.interop.gguf import GGUF, TensorInfo, open_gguf
from spmd_distill.interop.hub import fetch_from_hub, hub_id_of, is_hub_id
from spmd_distill.interop.huggingface import open_huggingface
from spmd_distill.interop.names import gguf_to_huggingface
from spmd_distill.interop.tokenizer import TextTokenizer, tokenizer_from_folder
from spmd_distill.interop.tokenizer_compare import TokenizerDifference, compare_tokenizers
from spmd_distill.interop.tokenizer_gguf import tokenizer_from_gguf
from spmd_distill.interop.tokenizer_trim import rows_of, trim_tokenizer, used_tokens

__all__ = [
    "CARD",
    "GGUF",
    "TOKENIZER_FILES",
    "MissingTensorError",
    "ModelCard",
    "TensorInfo",
    "TextTokenizer",
    "TokenizerDifference",
    "Weights",
    "compare_tokenizers",
    "fetch_from_hub",
    "gguf_to_huggingface",
    "hub_id_of",
    "is_hub_id",
    "open_gguf",
    "open_huggingface",
    "read_front_matter",
    "rows_of",
    "save_huggingface",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
    "trim_tokenizer",
    "used_tokens",
]
