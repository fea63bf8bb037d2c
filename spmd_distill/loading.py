"""From names in a run file to models, tokenizers and text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmd_distill.assets import fetch_demo_assets
from spmd_distill.data import Document, Rows, check_vocabulary, demo_documents, pack, read_documents, split_documents
from spmd_distill.errors import UserError
from spmd_distill.interop import (
    TextTokenizer,
    Weights,
    gguf_to_huggingface,
    open_gguf,
    open_huggingface,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import FAMILIES, Model, decoder, load_params
from spmd_distill.types import Params

DEMO = "demo"
"""The name that stands for the demo's own teacher and text."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: what it is, its tokenizer, and its weights, not yet read."""

    model: Model
    family: Any
    huggingface_config: dict[str, Any]
    tokenizer: TextTokenizer
    weights: Weights

    def load(self, mapper: AbstractMapper) -> Params:
        """Read the weights straight into the shards of ``mapper``."""
        rules = self.family.rules(self.model.config)
        return load_params(self.model, rules, self.weights, mapper, source=self.weights.source)


def open_checkpoint(path: str, param_dtype: str = "float32", say: Say = lambda message: None) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder, or the demo's teacher.

    Raises `UserError` for a missing, damaged or foreign file and for an architecture without a family here.
    """
    file = fetch_demo_assets(progress=say).teacher if path == DEMO else Path(path)
    if file.is_dir():
        config, weights = open_huggingface(file)
        tokenizer = tokenizer_from_folder(file)
    else:
        gguf = open_gguf(file)
        config, weights = gguf_to_huggingface(gguf)
        tokenizer = tokenizer_from_gguf(gguf)
    name = (config.get("architectures") or ["(none)"])[0]
    if name not in FAMILIES:
        raise UserError(f"{file}: architecture {name!r} is not supported; known are {', '.join(FAMILIES)}.")
    family = FAMILIES[name]
    sizes = replace(family.config_from_huggingface(config), param_dtype=param_dtype)
    if tokenizer.vocab_size > sizes.vocab_size:
        raise UserError(
            f"{file}: its tokenizer has {tokenizer.vocab_size} tokens, its embedding only {sizes.vocab_size} rows. "
            f"Tokenizer and weights belong to different models."
        )
    return Checkpoint(decoder(sizes), family, config, tokenizer, weights)


def documents(
    train: Sequence[str], heldout: Sequence[str], say: Say = lambda message: None
) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents; without held-out text, a tenth of the training documents is set aside."""
    if list(train) == [DEMO]:
        training, aside = demo_documents(fetch_demo_assets(progress=say))
        return training, read_documents(heldout) if heldout else aside
    training = read_documents(list(train))
    return (training, read_documents(list(heldout))) if heldout else split_documents(training, 0.1)


def tokenise(
    texts: Sequence[Document], tokenizer: TextTokenizer, length: int, vocab_size: int, max_tokens: int | None, what: str
) -> Rows:
    """Encode documents and pack them into rows of ``length``.

    With ``max_tokens``, about so many: an equal part from every source (the first part of a document's name), taken as
    passages spread over all its documents. Raises `UserError` where no row comes out of it.
    """
    parts = [d.text for d in texts]
    if max_tokens is not None:
        sources = [d.name.split("/")[0] for d in texts]
        characters = {s: sum(len(t) for t, other in zip(parts, sources, strict=True) if other == s) for s in sources}
        wanted = 4 * max_tokens / max(len(characters), 1)  # English has some 4 characters a token
        share = {s: min(1.0, wanted / max(n, 1)) for s, n in characters.items()}
        parts = [_passages(t, max(int(len(t) * share[s]), 200)) for t, s in zip(parts, sources, strict=True)]
    rows = pack(tokenizer.encode_batch(parts), length)
    if not len(rows) or not rows.valid_tokens:
        raise UserError(f"The {what} text ({len(texts)} documents) has no two tokens in a row: nothing to learn from.")
    check_vocabulary(rows, vocab_size)
    return rows


def _passages(text: str, size: int, pieces: int = 8) -> str:
    """About ``size`` characters of ``text``, in up to ``pieces`` passages spread over it, cut at line ends."""
    if len(text) <= size:
        return text
    each, parts = size // pieces, []
    for i in range(pieces):
        begin = text.find("\n", i * len(text) // pieces) + 1
        end = text.find("\n", begin + each)
        parts.append(text[begin : end if end > 0 else begin + each])
    return "\n".join(parts)
