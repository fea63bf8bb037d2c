"""From the run file's sources of text to the rows that are trained on, and to named sets of held-out rows."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spmd_distill.assets import default_cache, fetch_demo_assets
from spmd_distill.config import DataConfig, SourceConfig
from spmd_distill.data import (
    AbstractRows,
    AbstractSource,
    Document,
    Encoder,
    Loader,
    Mixture,
    PackedRows,
    Record,
    TokenTable,
    demo_documents,
    make_encoder,
    open_source,
    plan,
    read_documents,
    split_documents,
)
from spmd_distill.data.tokens import Settings, token_table
from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer
from spmd_distill.loading import DEMO, Say, is_text, shortened

HELD_OUT, HELD_OUT_MOST = 0.1, 1000
"""Without held-out text of its own, a source of records gives this share of them, and no more than so many."""


@dataclass(frozen=True)
class Corpus:
    """What a run trains on and is evaluated on."""

    train: AbstractRows
    heldout: dict[str, AbstractRows]
    """By the name of their source."""
    notes: tuple[str, ...]
    """What was read and how it was packed, for people."""

    def loader(self, config: DataConfig, seed: int) -> Loader:
        """The batches of every optimizer step, in the order of ``data.seed``, else of the run's ``seed``."""
        seed = seed if config.seed is None else config.seed
        return Loader(self.train, config.rows, config.micro_batches, seed, config.shuffle)


@dataclass(frozen=True)
class DocumentSource(AbstractSource):
    """Documents in memory as the records of a source."""

    name: str
    documents: Sequence[Document] = field(repr=False)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.documents)

    def __getitem__(self, index: int) -> Record:
        """One document."""
        return Record({"text": self.documents[index].text}, self.documents[index].name)

    def fingerprint(self) -> str:
        """Of all texts, in order."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(hashlib.sha256(document.text.encode(errors="surrogatepass")).digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class _Reader:
    """How the text of one run becomes rows."""

    data: DataConfig
    encoder: Encoder
    vocab_size: int
    say: Say
    notes: list[str]

    def table(self, source: AbstractSource, limit: int | None = None) -> TokenTable:
        """A source's tokens, checked against the vocabulary."""
        folder = {None: None, "auto": default_cache() / "tokens"}.get(self.data.cache, Path(self.data.cache or "."))
        settings = Settings(folder and folder.expanduser(), self.data.on_bad, limit, self.data.workers, self.say)
        table, report = token_table(source, self.encoder, settings)
        if sum(report.bad.values()) or report.cut:
            self.notes.extend(report.lines())
        table.check_vocabulary(self.vocab_size, source.name)
        return table

    def rows(self, name: str, table: TokenTable, documents: np.ndarray | None = None) -> PackedRows:
        """Examples of a table as rows."""
        packed = PackedRows(table, plan(table, self.data.length, self.data.pack, documents), packing=self.data.pack)
        if not packed.valid_tokens:
            raise UserError(f"{name}: has no two tokens in a row of which the second counts: nothing to learn from.")
        return packed

    def documents(self, name: str, documents: Sequence[Document], limit: int | None) -> PackedRows:
        """Documents as rows; with a limit, passages of them."""
        texts = documents if limit is None else shortened(documents, limit)
        return self.rows(name, self.table(DocumentSource(name, tuple(texts))))


def load_corpus(
    data: DataConfig, tokenizer: TextTokenizer, vocab_size: int, eval_rows: int, say: Say = lambda message: None
) -> Corpus:
    """Tokenise and pack the text of a run, or find it in the cache.

    Args:
        data: what the run file says of it.
        tokenizer: of teacher and student.
        vocab_size: ids must be below.
        eval_rows: held-out rows that an evaluation scores: about twice as many are made.
        say: is told what takes long.

    Without ``data.heldout``, a tenth of each source is held out: whole documents of text files, none of which shares a
    paragraph with a training document; of records, those with the smallest hashes, at most 1000, so that copies fall on
    one side.

    Raises:
        UserError: text is missing, malformed or empty, or does not fit the tokenizer; names the file and the line.
    """
    encoder = encoder_of(data, tokenizer)
    read = _Reader(data, encoder, vocab_size, say, [])
    sources, aside = data.sources, data.heldout_sources
    part = _part(data)
    enough = 2 * eval_rows * data.length
    trained, held = _texts(sources, not aside, say)
    train: dict[str, AbstractRows] = {}
    heldout: dict[str, AbstractRows] = {}
    for source in sources:
        name = source.name or source.path
        if name in trained:
            if trained[name]:
                train[name] = read.documents(name, trained[name], part)
            else:
                read.notes.append(f"{name}: is held out from training as a whole")
            if held.get(name) and not aside:
                heldout[name] = read.documents(name, held[name], enough)
            continue
        table = read.table(open_source(source.path, name, field=source.field), part)
        chosen = None if aside else _smallest_hashes(table, name)
        rest = None if chosen is None else np.setdiff1d(np.arange(len(table)), chosen)
        train[name] = read.rows(name, table, rest)
        if chosen is not None:
            heldout[name] = read.rows(f"{name} (held out)", table, chosen)
    for source in aside:
        name = source.name or source.path
        if (documents := heldout_documents(source, say)) is not None:
            heldout[name] = read.documents(name, documents, enough)
        else:
            found = open_source(source.path, name, field=source.field)
            heldout[name] = read.rows(name, read.table(found, enough))
    weights = {s.name: s.weight for s in sources if s.name in train}
    shares = None if all(w is None for w in weights.values()) else [w or 1.0 for w in weights.values()]
    for name, rows in train.items():
        assert isinstance(rows, PackedRows)
        read.notes.append(f"{name}: {len(rows):,} rows of {rows.length} ({data.pack}), {rows.density:.1%} full")
    rows = next(iter(train.values())) if len(train) == 1 else Mixture(train, shares)
    return Corpus(rows, heldout, tuple(read.notes))


def encoder_of(data: DataConfig, tokenizer: TextTokenizer) -> Encoder:
    """What makes the tokens of a record. Raises `UserError` for a template that cannot be read, or is malformed."""
    return make_encoder(
        tokenizer,
        loss=data.loss,
        template=None if data.template is None else _read_template(data.template),
        add_special=data.add_special,
        max_tokens=data.max_tokens,
        too_long=data.too_long,
    )


def training_sources(data: DataConfig, say: Say = lambda message: None) -> dict[str, AbstractSource]:
    """The training text as `load_corpus` tokenises it, by the names of its sources; nothing is tokenised.

    Raises `UserError` where text is missing.
    """
    trained, _ = _texts(data.sources, not data.heldout_sources, say)
    part, found = _part(data), dict[str, AbstractSource]()
    for source in data.sources:
        name = source.name or source.path
        if name not in trained:
            found[name] = open_source(source.path, name, field=source.field)
        elif texts := trained[name]:
            found[name] = DocumentSource(name, tuple(texts if part is None else shortened(texts, part)))
    return found


def _part(data: DataConfig) -> int | None:
    """Tokens of each training source where they are limited."""
    return None if data.max_train_tokens is None else -(-data.max_train_tokens // len(data.sources))


def _texts(
    sources: Sequence[SourceConfig], split: bool, say: Say
) -> tuple[dict[str, list[Document]], dict[str, list[Document]]]:
    """Training and held-out documents of the sources that are text, by name."""
    train: dict[str, list[Document]] = {}
    heldout: dict[str, list[Document]] = {}
    names = {source.path: source.name or source.path for source in sources}
    for path in (path for path in names if path == DEMO):
        train[names[path]], heldout[names[path]] = demo_documents(fetch_demo_assets(progress=say))
    paths = [path for path in names if path != DEMO and is_text(path)]
    if paths:
        read_documents(paths)  # says what was given twice
    own = {names[path]: read_documents(path) for path in paths}
    if own and split:
        _, aside = split_documents([document for documents in own.values() for document in documents], HELD_OUT)
        apart = {document.name for document in aside}
        for name, documents in own.items():
            train[name] = [document for document in documents if document.name not in apart]
            heldout[name] = [document for document in documents if document.name in apart]
    else:
        train |= own
    return train, heldout


def heldout_documents(source: SourceConfig, say: Say = lambda message: None) -> list[Document] | None:
    """The documents of a held-out source that is text; None for one of records."""
    if source.path == DEMO:
        return demo_documents(fetch_demo_assets(progress=say))[1]
    return read_documents(source.path) if is_text(source.path) else None


def _smallest_hashes(table: TokenTable, name: str) -> np.ndarray:
    """Numbers of the examples to hold out."""
    count = min(max(int(HELD_OUT * len(table)), 1), HELD_OUT_MOST)
    limit = np.sort(np.asarray(table.hashes))[count - 1]
    chosen = np.flatnonzero(table.hashes <= limit)
    if len(chosen) == len(table):
        raise UserError(
            f"{name}: its {len(table)} record(s) cannot be split into training and held-out text: that takes at least "
            "two that differ. Give more records, or name held-out files of their own in data.heldout."
        )
    return chosen


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.template: {path} cannot be read ({error}); expected a file with a Jinja template."
        ) from None
