"""ArrayRecord files as records: JSON objects with random access, the format that grain reads."""

import threading
from typing import Any

from etils import epath

from spmd_distill.data.base import AbstractSource, BadRecord, Record
from spmd_distill.data.sources.files import file_fingerprint, is_remote
from spmd_distill.data.sources.json_lines import json_record
from spmd_distill.data.sources.parquet import needed
from spmd_distill.errors import UserError


class ArrayRecord(AbstractSource):
    """An ArrayRecord file whose records are JSON objects as UTF-8. The library reads local files alone."""

    def __init__(self, path: epath.Path, name: str, shown: str, field: str):
        if is_remote(path):
            raise UserError(f"{path}: ArrayRecord is read from local disks alone. Copy the file, or use Parquet.")
        self.name = name
        self._path, self._shown, self._field = path, shown, field
        module = "array_record.python.array_record_module"
        self._module = needed(module, "array-record", f"{path}: reading ArrayRecord")
        self._reader: Any = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_path": self._path, "_shown": self._shown, "_field": self._field}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_path"], state["name"], state["_shown"], state["_field"])

    def __len__(self) -> int:
        """The number of records. Raises `UserError` where the file cannot be read or is damaged at its end."""
        return self._open().num_records()

    def __getitem__(self, index: int) -> Record:
        """One record. Raises `BadRecord` where its chunk is damaged or does not hold a JSON object."""
        records = len(self)
        if not -records <= index < records:
            raise IndexError(index)
        index %= records
        where = f"{self._shown}, record {index + 1}"
        with self._lock:
            reader = self._open()
            try:
                data = reader.read([index])[0]
            except RuntimeError as error:
                self._reader = None  # it does not recover
                raise BadRecord(where, f"damaged: {str(error)[:200]}") from None
        return json_record(data, where, self._field)

    def fingerprint(self) -> str:
        """Of the file's bytes and the field."""
        return file_fingerprint(self._path, "arrayrecord", self._field)

    def _open(self) -> Any:
        if self._reader is None:
            reader = self._module.ArrayRecordReader(str(self._path))
            if not reader.ok():  # and it must not be read: what it returns then is nothing, without an error
                try:
                    reader.close()
                    reason = "its end is missing"
                except RuntimeError as error:
                    reason = str(error).split("; opening")[0][:200] or "its end is missing"
                raise UserError(
                    f"{self._path}: is not a whole ArrayRecord file ({reason}). Fetch or write it again."
                ) from None
            self._reader = reader
        return self._reader
