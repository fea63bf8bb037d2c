"""From a path to records: which reader a file is for, and several files as one source."""

import hashlib
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from etils import epath

from spmd_distill.data.base import AbstractSource, Record
from spmd_distill.data.sources.array_record import ArrayRecord
from spmd_distill.data.sources.files import check_scheme, find_files, is_remote
from spmd_distill.data.sources.huggingface import HUB, HuggingFace, is_dataset_folder
from spmd_distill.data.sources.json_lines import JsonLines
from spmd_distill.data.sources.parquet import Parquet
from spmd_distill.data.sources.text_file import TextFile
from spmd_distill.errors import UserError

READERS: dict[str, Callable[[epath.Path, str, str, str], AbstractSource]] = {
    ".jsonl": JsonLines,
    ".jsonl.gz": JsonLines,
    ".json": JsonLines,
    ".json.gz": JsonLines,
    ".ndjson": JsonLines,
    ".parquet": Parquet,
    ".arrayrecord": ArrayRecord,
    ".array_record": ArrayRecord,
    ".txt": TextFile,
}
"""How a file's name ends -> what reads it."""


class JoinedSource(AbstractSource):
    """Several sources one after another."""

    def __init__(self, name: str, parts: Sequence[AbstractSource]):
        self.name = name
        self.parts = tuple(parts)
        self._ends: list[int] | None = None

    def __len__(self) -> int:
        """The sum of the parts' lengths."""
        return self._counted()[-1] if self.parts else 0

    def __getitem__(self, index: int) -> Record:
        """One record of one of the parts. Raises `BadRecord` as the part does."""
        records = len(self)
        if not -records <= index < records:
            raise IndexError(index)
        index %= records
        ends = self._counted()
        part = int(np.searchsorted(ends, index, side="right"))
        return self.parts[part][index - (ends[part - 1] if part else 0)]

    def fingerprint(self) -> str:
        """Of the parts' fingerprints, in order."""
        return hashlib.sha256("joined ".join(part.fingerprint() for part in self.parts).encode()).hexdigest()

    def _counted(self) -> list[int]:
        if self._ends is None:
            self._ends = list(accumulate(len(part) for part in self.parts))
        return self._ends


def open_source(path: str | os.PathLike[str], name: str | None = None, *, field: str = "text") -> AbstractSource:
    """The records of a file, a folder, a pattern or a data set; nothing but names is read yet.

    Args:
        path: JSON Lines (``.jsonl``, ``.ndjson`` or ``.json``, also ``.gz``), Parquet, ArrayRecord or a text file;
            a folder or a glob of such files, in the order of their names; a folder of ``Dataset.save_to_disk``;
            ``hf://OWNER/NAME``. Files may lie on this machine or behind ``gs://``, ``s3://`` or ``az://``.
        name: What metrics and mixtures call it; None takes the name of the file or folder.
        field: The field that holds the text, or the messages of a conversation, where it is not called ``text`` or
            ``messages``. All other fields are dropped then.

    Raises:
        UserError: Nothing is there (with the nearest name that is), its kind is not known, or the package that
        reads it is missing. What is wrong inside of a file is told when it is read.
    """
    path = os.path.expanduser(os.fspath(path))
    if not path:
        raise UserError("the path of a data source is empty: expected a file, a folder, a pattern or hf://NAME.")
    if path.startswith(HUB):
        return HuggingFace(path, name or path.removeprefix(HUB).partition(":")[0].split("/")[-1], field)
    check_scheme(path)
    if not is_remote(path) and is_dataset_folder(Path(path)):
        return HuggingFace(path, name or Path(path).resolve().name, field)
    files = find_files(path, tuple(READERS))
    name = name or _name_of(path, files[0][0])
    parts = [_reader(file)(file, name, shown, field) for file, shown in files]
    return parts[0] if len(parts) == 1 else JoinedSource(name, parts)


def _name_of(path: str, first: epath.Path) -> str:
    whole = epath.Path(path)
    if any(c in path for c in "*?[") and not (not is_remote(path) and whole.exists()):
        return first.parent.name or "data"
    if whole == first:
        return first.name.split(".")[0] or first.name
    return (whole if is_remote(path) else whole.resolve()).name


def _reader(file: epath.Path) -> Callable[[epath.Path, str, str, str], AbstractSource]:
    for suffix, reader in READERS.items():
        if file.name.lower().endswith(suffix):
            return reader
    raise UserError(
        f"{file}: found file type {file.suffix or '(none)'}, expected {', '.join(READERS)}. Every character of a text "
        "file is trained on: if this is plain text name it .txt, otherwise convert it."
    )
