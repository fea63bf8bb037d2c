"""Models, weights and tokenizers of other tools, in and out: Hugging Face folders and GGUF files."""

from spmd_distill.interop.base import MissingTensorError, Weights
from spmd_distill.interop.export import save_huggingface
from spmd_distill.interop.gguf import GGUF, TensorInfo, open_gguf
from spmd_distill.interop.huggingface import open_huggingface
from spmd_distill.interop.names import gguf_to_huggingface
from spmd_distill.interop.tokenizer import TextTokenizer, tokenizer_from_folder
from spmd_distill.interop.tokenizer_compare import TokenizerDifference, compare_tokenizers
from spmd_distill.interop.tokenizer_gguf import tokenizer_from_gguf

__all__ = [
    "GGUF",
    "MissingTensorError",
    "TensorInfo",
    "TextTokenizer",
    "TokenizerDifference",
    "Weights",
    "compare_tokenizers",
    "gguf_to_huggingface",
    "open_gguf",
    "open_huggingface",
    "save_huggingface",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
]
