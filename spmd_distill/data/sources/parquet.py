"""Rows of Parquet files as records."""

import importlib
import threading
from typing import Any

import numpy as np
from etils import epath

from spmd_distill.data.base import AbstractSource, BadRecord, Record
from spmd_distill.data.sources.files import file_fingerprint, is_remote, unreadable
from spmd_distill.data.sources.json_lines import choose_field
from spmd_distill.errors import UserError

_HELD = 2
"""Row groups that are held in memory: the one that is read, and one for the step over a border."""


def needed(module: str, install: str, what: str) -> Any:
    """An optional package. Raises `UserError` with the command that installs it where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{what} needs the package {module.split('.')[0]} ({error}). Run: pip install {install}"
        ) from None


def without_nulls(value: Any) -> Any:
    """A value without the fields that are null: tables cannot tell null from missing, so neither counts."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


class Parquet(AbstractSource):
    """A Parquet file: a record a row, without its null fields.

    A row group is read and decoded as a whole, and the last two are kept: reading in order is fast, jumping
    through a file of large row groups is not.
    """

    def __init__(self, path: epath.Path, name: str, shown: str, field: str):
        self.name = name
        self._path, self._shown, self._field = path, shown, field
        self._parquet = needed("pyarrow.parquet", "'spmd_distill[parquet]'", f"{path}: reading Parquet")
        self._forget()

    def _forget(self) -> None:
        self._file: Any = None
        self._starts = np.zeros(1, np.int64)
        self._groups: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_path": self._path, "_shown": self._shown, "_field": self._field}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_path"], state["name"], state["_shown"], state["_field"])

    def __len__(self) -> int:
        """The number of rows. Raises `UserError` where the file cannot be read or is not Parquet."""
        with self._lock:
            self._open()
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Record:
        """One row. Raises `BadRecord` where its row group is damaged."""
        rows = len(self)
        if not -rows <= index < rows:
            raise IndexError(index)
        index %= rows
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        where = f"{self._shown}, row {index + 1}"
        try:
            with self._lock:
                table = self._group(group)
            row = table.slice(index - int(self._starts[group]), 1).to_pylist()[0]
        except Exception as error:  # pyarrow, its codecs and its conversions share no narrower type
            raise BadRecord(where, f"damaged: its row group {group} cannot be read ({_line(error)})") from None
        return Record(choose_field(without_nulls(row), where, self._field), where)

    def fingerprint(self) -> str:
        """Of the file's bytes and the field."""
        return file_fingerprint(self._path, "parquet", self._field)

    def _group(self, group: int) -> Any:
        if group not in self._groups:
            while len(self._groups) >= _HELD:
                del self._groups[next(iter(self._groups))]
            self._groups[group] = self._file.read_row_group(group)
        return self._groups[group]

    def _open(self) -> None:
        if self._file is not None:
            return
        try:
            given = self._path.open("rb") if is_remote(self._path) else str(self._path)
            file = self._parquet.ParquetFile(given, page_checksum_verification=True)
            rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        except (FileNotFoundError, PermissionError, ImportError) as error:
            raise unreadable(self._path, error) from None
        except Exception as error:  # see above
            raise UserError(
                f"{self._path}: is not a whole Parquet file ({_line(error)}). Fetch or write it again."
            ) from None
        self._file, self._starts = file, np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
