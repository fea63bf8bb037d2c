"""Where documents come from: text files, folders of them, and the reference pages that ship with CPython."""

import hashlib
import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmd_distill.errors import UserError

_TELLING = 80
"""A paragraph of at least this many characters, found in two documents, was copied and not met by chance."""


@dataclass(frozen=True)
class Document:
    """One text that belongs together: it is packed, trained on or held out as a whole."""

    name: str
    """Names the document in messages and decides on which side of a split it falls. No machine paths."""
    text: str


def read_documents(paths: str | Path | Iterable[str | Path]) -> list[Document]:
    """Read text files, and folders of text files in the order of their names, one document a file.

    A file is named after itself (``notes.txt``), a file of a folder after both (``plays/hamlet.txt``). Text
    is UTF-8; a byte-order mark is dropped and line ends become ``\\n``.

    Raises:
        UserError: nothing was given; a path does not exist, is not ``.txt``, was given twice, is empty or is
            not UTF-8 (with the offset of the first bad byte); a folder holds no ``.txt`` file.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    documents: list[Document] = []
    seen: set[Path] = set()
    for given in map(Path, paths):
        for file, name in _text_files(given):
            if file.resolve() in seen:
                raise UserError(f"{file}: given twice. Its text would count double; name it once.")
            seen.add(file.resolve())
            documents.append(Document(name, _decode(file)))
    if not documents:
        raise UserError("no text was given: expected the path of a .txt file, or of a folder with .txt files.")
    return documents


def pydoc_topics() -> list[Document]:
    """The Python reference pages behind ``help("topics")``: about half a megabyte of technical English,
    always there.

    They differ a little between Python versions. A page that is printed word for word inside a longer one
    ("while" in "compound") is left out.

    Raises:
        UserError: this Python was built without ``pydoc_data``.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise UserError(
            "this Python has no `pydoc_data.topics`, its own reference pages (some Linux packages leave them "
            "out). Install the full standard library, or give text of your own."
        ) from error
    kept: list[Document] = []
    printed: set[str] = set()
    for name, text in sorted(topics.items(), key=lambda topic: (-len(topic[1]), topic[0])):
        paragraphs = set(_paragraphs(text))
        if not paragraphs <= printed:
            kept.append(Document(f"pydoc/{name}", text))
        printed |= paragraphs
    return sorted(kept, key=lambda document: document.name)


def split_documents(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Split into (train, held out) by whole documents, holding out about ``fraction`` of all characters.

    The side is decided by the hash of a document's name, so it is the same on every machine and for every
    order of the documents. Documents that share a paragraph stay on one side: held-out text is never seen in
    training.

    Raises:
        UserError: ``fraction`` is not between 0 and 1, or the documents do not fall apart into two groups.
    """
    if not 0 < fraction < 1:
        raise UserError(f"held-out fraction: found {fraction}, expected a number between 0 and 1, such as 0.1.")
    groups = _groups(documents)
    if len(groups) < 2:
        raise UserError(
            f"{len(documents)} document(s) cannot be split into training and held-out text: that takes at "
            "least two that share no paragraph. Give more files, or name held-out files of their own."
        )
    budget = fraction * sum(len(document.text) for document in documents)
    held_out: list[Document] = []
    for group in sorted(groups, key=lambda group: _hash(min(document.name for document in group))):
        size = sum(len(document.text) for document in group)
        if size <= budget:
            held_out += group
            budget -= size
    if not held_out:
        held_out = min(groups, key=lambda group: sum(len(document.text) for document in group))
    names = {document.name for document in held_out}
    return [d for d in documents if d.name not in names], [d for d in documents if d.name in names]


def _text_files(given: Path) -> list[tuple[Path, str]]:
    """The files that one given path stands for, each with the name of its document."""
    if given.is_dir():
        files = sorted(file for file in given.glob("*.txt") if file.is_file())
        if not files:
            raise UserError(f"{given}: found no .txt file in this folder (folders inside it are not searched).")
        return [(file, f"{given.resolve().name}/{file.name}") for file in files]
    if not given.is_file():
        raise UserError(f"{given}: no such file or folder; expected a .txt file or a folder with .txt files.")
    if given.suffix != ".txt":
        raise UserError(
            f"{given}: found file type {given.suffix or '(none)'}, expected .txt. Every character of "
            "a text file is trained on: if this is plain text rename it, otherwise extract its text first."
        )
    return [(given, given.name)]


def decode_text(data: bytes) -> str:
    """The text of a file's bytes: UTF-8, without a byte-order mark, with line ends as ``\\n``.

    Raises `UserError`, which does not name the file, where they are not UTF-8 or hold no text.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"not UTF-8 at byte offset {error.start} (0x{data[error.start]:02x}, {error.reason}). "
            "Convert it, for example with `iconv -f LATIN1 -t UTF-8`."
        ) from None
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise UserError(f"the file holds no text ({len(data)} bytes). Remove it from the list or fill it.")
    return text


def _decode(file: Path) -> str:
    try:
        return decode_text(file.read_bytes())
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _paragraphs(text: str) -> list[str]:
    """Paragraphs in one spelling: white space and the rules under headings do not count."""
    parts = (re.sub(r"[*=~^\"-]{3,}", " ", part) for part in re.split(r"\n\s*\n", text))
    return [" ".join(words) for words in map(str.split, parts) if words]


def _groups(documents: Sequence[Document]) -> list[list[Document]]:
    """The connected components of the documents under "share a telling paragraph, or a name"."""
    parent = list(range(len(documents)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    owner: dict[str, int] = {}
    for index, document in enumerate(documents):
        telling = {paragraph for paragraph in _paragraphs(document.text) if len(paragraph) >= _TELLING}
        for key in telling | {"name: " + document.name}:
            parent[root(index)] = root(owner.setdefault(key, index))
    groups: dict[int, list[Document]] = {}
    for index, document in enumerate(documents):
        groups.setdefault(root(index), []).append(document)
    return list(groups.values())


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
