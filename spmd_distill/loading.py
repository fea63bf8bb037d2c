"""From names in a run file to models, tokenizers and text."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from spmd_distill.assets import fetch_demo_assets
from spmd_distill.data import (
    BadRecord,
    Document,
    Record,
    Rows,
    check_vocabulary,
    demo_documents,
    open_source,
    pack,
    read_documents,
    split_documents,
)
from spmd_distill.errors import UserError
from spmd_distill.interop import (
    CARD,
    GGUF,
    TextTokenizer,
    Weights,
    fetch_from_hub,
    gguf_to_huggingface,
    hub_id_of,
    is_hub_id,
    open_gguf,
    open_huggingface,
    read_front_matter,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import FAMILIES, Model, decoder, load_params
from spmd_distill.types import Params

DEMO = "demo"
"""The name that stands for the demo's own teacher and text."""
_DEMO_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"

_RECORDS = 2000
"""Of a source of records, so many are enough to measure a model on."""

PARAM_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""What parameters may be held in."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """Where a model comes from."""

    name: str
    """As it was asked for: a path, a hub id or ``demo``."""
    path: Path
    """Its folder or file on this machine."""
    repository: str | None = None
    """Its id on the Hugging Face hub, where that is known."""
    license: str | None = None
    """As its own card or metadata says."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: what it is, its tokenizer, and its weights, not yet read."""

    model: Model
    family: Any
    huggingface_config: dict[str, Any]
    tokenizer: TextTokenizer
    weights: Weights
    source: Source

    def load(self, mapper: AbstractMapper, layers: Sequence[int] | None = None) -> Params:
        """Read the weights straight into the shards of ``mapper``; with ``layers``, only those, for `of_layers`."""
        model = self.model if layers is None else self.of_layers(layers)
        rules = self.family.rules(model.config)
        return load_params(model, rules, self.weights, mapper, layers, source=self.weights.source)

    def of_layers(self, layers: Sequence[int]) -> Model:
        """The model made of these layers of it, in order; raise `UserError` for one it does not have."""
        depth = self.model.config.layers
        if not layers or any(not 0 <= i < depth for i in layers):
            raise UserError(f"{self.source}: layers {list(layers)} were asked for; expected some of 0 to {depth - 1}.")
        return decoder(self.model.config.of_layers(layers))


def find_source(
    name: str | Path, download: bool = False, revision: str | None = None, say: Say = lambda message: None
) -> Source:
    """Find a Hugging Face folder, a GGUF file, the demo's teacher (``demo``) or, with ``download``, a hub's model.

    What lies on this machine under that name comes first. Raises `UserError` where nothing is found.
    """
    name = str(name)
    path = Path(name).expanduser()
    if name == DEMO:
        return Source(name, fetch_demo_assets(progress=say).teacher, _DEMO_REPOSITORY)
    if path.exists():
        if revision is not None:
            raise UserError(f"{name}: is on this machine, so revision {revision!r} cannot be taken; leave it out.")
        return Source(name, path, hub_id_of(path.resolve()))
    if not is_hub_id(name):
        raise UserError(f"{name}: no such file or folder, expected a Hugging Face folder or a GGUF file.")
    if not download:
        raise UserError(
            f"{name}: no such file or folder. If it is a model of the Hugging Face hub, fetch it with "
            f"`hf download {name} --local-dir FOLDER` and give FOLDER, or call load_pretrained({name!r}, "
            f"download=True)."
        )
    say(f"downloading {name} from the Hugging Face hub")
    return Source(name, fetch_from_hub(name, revision), name)


def open_checkpoint(
    path: str | Path | Source, param_dtype: str = "float32", say: Say = lambda message: None
) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder, or the demo's teacher; no weight is read yet.

    Raises `UserError` for a missing, damaged or foreign file, for an architecture without a family here, and for a
    ``param_dtype`` that parameters cannot have.
    """
    if param_dtype not in PARAM_DTYPES:
        raise UserError(f"param_dtype is {param_dtype!r}; expected one of {', '.join(PARAM_DTYPES)}.")
    if param_dtype == "float64" and not jax.config.read("jax_enable_x64"):
        raise UserError(
            'param_dtype is float64, which JAX has to be set to: jax.config.update("jax_enable_x64", True).'
        )
    source = path if isinstance(path, Source) else find_source(path, say=say)
    file = source.path
    if file.is_dir():
        config, weights = open_huggingface(file)
        tokenizer = tokenizer_from_folder(file)
        licence = _licence_of_folder(file)
    else:
        gguf = open_gguf(file)
        config, weights = gguf_to_huggingface(gguf)
        tokenizer = tokenizer_from_gguf(gguf)
        licence = gguf.get("general.license", str, None)
        source = replace(source, repository=source.repository or _repository_of_gguf(gguf))
    name = (config.get("architectures") or ["(none)"])[0]
    if name not in FAMILIES:
        raise UserError(f"{file}: architecture {name!r} is not supported; known are {', '.join(FAMILIES)}.")
    family = FAMILIES[name]
    try:
        sizes = replace(family.config_from_huggingface(config), param_dtype=param_dtype)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    if tokenizer.vocab_size > sizes.vocab_size:
        raise UserError(
            f"{file}: its tokenizer has {tokenizer.vocab_size} tokens, its embedding only {sizes.vocab_size} rows. "
            f"Tokenizer and weights belong to different models."
        )
    return Checkpoint(decoder(sizes), family, config, tokenizer, weights, replace(source, license=licence))


def _licence_of_folder(folder: Path) -> str | None:
    try:
        text = (folder / CARD).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = read_front_matter(text).get("license")
    return found if isinstance(found, str) else None


def _repository_of_gguf(gguf: GGUF) -> str | None:
    hub = "https://huggingface.co/"
    for key in ("general.source.repo_url", "general.repo_url"):
        url = gguf.get(key, str, "")
        if url.startswith(hub) and is_hub_id(url.removeprefix(hub)):
            return url.removeprefix(hub)
    return None


def documents(
    train: Sequence[str], heldout: Sequence[str], say: Say = lambda message: None
) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents; without held-out text, a tenth of the training documents is set aside."""
    if list(train) == [DEMO]:
        training, aside = demo_documents(fetch_demo_assets(progress=say))
        return training, _documents(heldout) if heldout else aside
    training = _documents(train)
    return (training, _documents(heldout)) if heldout else split_documents(training, 0.1)


def is_text(path: str) -> bool:
    """Whether a path is that of a text file, or of a folder with some, and not of records."""
    found = Path(path)
    return path.endswith(".txt") if not found.is_dir() else any(found.glob("*.txt"))


def _documents(paths: Sequence[str]) -> list[Document]:
    """The documents of text files; of other sources, up to `_RECORDS` records spread over each, as plain text."""
    records = [path for path in paths if not is_text(path)]
    texts = [path for path in paths if is_text(path)]
    found = read_documents(texts) if texts else []
    for source in map(open_source, records):
        for index in range(0, len(source), max(len(source) // _RECORDS, 1)):
            with suppress(BadRecord):
                record = source[index]
                found.append(Document(record.where, _text_of(record)))
    return found


def _text_of(record: Record) -> str:
    """What is said in a record, without what a chat template puts around it."""
    value = record.value
    if isinstance(messages := value.get("messages"), list):
        return "\n".join(str(m.get("content")) for m in messages if isinstance(m, dict))
    return "".join(str(value[field]) for field in ("text", "prompt", "completion") if value.get(field) is not None)


def tokenise(
    texts: Sequence[Document], tokenizer: TextTokenizer, length: int, vocab_size: int, max_tokens: int | None, what: str
) -> Rows:
    """Encode documents and pack them into rows of ``length``.

    With ``max_tokens``, about so many: an equal part from every source (the first part of a document's name), taken as
    passages spread over all its documents. Raises `UserError` where no row comes out of it.
    """
    parts = [d.text for d in (texts if max_tokens is None else shortened(texts, max_tokens))]
    rows = pack(tokenizer.encode_batch(parts), length)
    if not len(rows) or not rows.valid_tokens:
        raise UserError(f"The {what} text ({len(texts)} documents) has no two tokens in a row: nothing to learn from.")
    check_vocabulary(rows, vocab_size)
    return rows


def shortened(texts: Sequence[Document], max_tokens: int) -> list[Document]:
    """Passages of documents with about ``max_tokens`` tokens in all: an equal part from every source (the first part of
    a document's name), spread over all its documents.
    """
    sources = [d.name.split("/")[0] for d in texts]
    characters = dict.fromkeys(sources, 0)
    for document, source in zip(texts, sources, strict=True):
        characters[source] += len(document.text)
    wanted = 4 * max_tokens / max(len(characters), 1)  # English has some 4 characters a token
    share = {source: min(1.0, wanted / max(count, 1)) for source, count in characters.items()}
    return [
        replace(d, text=_passages(d.text, max(int(len(d.text) * share[s]), 200)))
        for d, s in zip(texts, sources, strict=True)
    ]


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
