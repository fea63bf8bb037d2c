"""Data sets of the Hugging Face ``datasets`` library as records."""

import hashlib
import json
from pathlib import Path
from typing import Any

from spmd_distill.data.base import AbstractSource, BadRecord, Record
from spmd_distill.data.sources.json_lines import choose_field
from spmd_distill.data.sources.parquet import needed, without_nulls
from spmd_distill.errors import UserError

HUB = "hf://"


def is_dataset_folder(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote this folder: one split, or several in folders inside it."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


class HuggingFace(AbstractSource):
    """A folder of ``save_to_disk``, or a data set by its name: ``hf://OWNER/NAME[/CONFIG][:SPLIT]``.

    Of several splits, ``train`` is taken where none is named. For a folder, name the split's own folder.
    """

    def __init__(self, path: str, name: str, field: str):
        self.name = name
        self._path, self._field = path, field
        self._library = needed("datasets", "'spmd_distill[datasets]'", f"{path}: reading this data set")
        self._rows: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_path": self._path, "_field": self._field}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_path"], state["name"], state["_field"])

    def __len__(self) -> int:
        """The number of rows. Raises `UserError` where the library cannot load the data set."""
        return len(self._open())

    def __getitem__(self, index: int) -> Record:
        """One row, without its null fields. Raises `BadRecord` where it cannot be decoded."""
        rows = self._open()
        if not -len(rows) <= index < len(rows):
            raise IndexError(index)
        index %= len(rows)
        where = f"{self._path.rstrip('/').split('/')[-1]}, row {index + 1}"
        try:
            row = rows[index]
        except Exception as error:  # whatever the decoders of its columns raise
            raise BadRecord(where, f"damaged: {' '.join(str(error).split())[:200]}") from None
        return Record(choose_field(without_nulls(row), where, self._field), where)

    def fingerprint(self) -> str:
        """Of the Arrow files below and the field; of the rows themselves where there are no files."""
        rows = self._open()
        digest = hashlib.sha256(f"huggingface {len(rows)} {self._field}".encode())
        files = [item["filename"] for item in rows.cache_files]
        for file in files:
            with open(file, "rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        if not files:
            for row in rows:
                digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
        return digest.hexdigest()

    def _open(self) -> Any:
        if self._rows is None:
            try:
                loaded = self._load()
            except Exception as error:  # the library's own, those of the network, of Arrow, of the file system
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                raise UserError(f"{self._path}: the datasets library cannot load it: {reason}") from None
            if isinstance(loaded, dict):
                if "train" not in loaded and len(loaded) != 1:
                    form = f"{self._path}:{next(iter(loaded), 'SPLIT')}"
                    form = form if self._path.startswith(HUB) else form.replace(":", "/")
                    raise UserError(f"{self._path}: holds the splits {', '.join(loaded)}. Name one, such as {form}.")
                loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
            self._rows = loaded
        return self._rows

    def _load(self) -> Any:
        if not self._path.startswith(HUB):
            return self._library.load_from_disk(self._path)
        name, _, split = self._path.removeprefix(HUB).partition(":")
        owner_and_name, config = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:]) or None
        return self._library.load_dataset(owner_and_name, config, split=split or None)
