"""JSON objects as records: one a line of a file, with random access."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from spmd_distill.data.base import AbstractSource, BadRecord, Record
from spmd_distill.data.sources.files import ByteFile, file_fingerprint

_BOM = b"\xef\xbb\xbf"
_SPACE = np.frombuffer(b" \t\r\n\v\f", np.uint8)


def json_record(data: bytes, where: str, field: str = "text") -> Record:
    """The record that some bytes spell. Raises `BadRecord` where they are not UTF-8, not JSON, or no object."""
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise BadRecord(where, f"not UTF-8: found {byte} of the record. Write the file as UTF-8.") from None
    except RecursionError:
        raise BadRecord(where, "not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # also a number of too many digits
        what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        array = "; expected one object a line, `jq -c '.[]'` makes that of an array" if data[:1] == b"[" else ""
        raise BadRecord(where, f"not JSON: {what}{array}") from None
    return Record(choose_field(value, where, field), where)


def choose_field(row: Any, where: str, field: str) -> Mapping[str, Any]:
    """What a row holds, or, where ``field`` is not "text", that field alone as ``text`` (a list as ``messages``).

    Raises `BadRecord` for what is no object, or lacks the field.
    """
    if not isinstance(row, dict):
        raise BadRecord(where, f"not an object: found {json_kind(row)}, expected fields such as {{'text': ...}}")
    if field == "text":
        return row
    if row.get(field) is None:
        found = ", ".join(map(repr, row)) or "nothing"
        raise BadRecord(where, f"no field {field!r}: found {found}")
    return {"messages" if isinstance(row[field], list) else "text": row[field]}


def json_kind(value: Any) -> str:
    """What to call a value in a message: as JSON does."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "a number"}
    names |= {float: "a number", type(None): "null"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


class JsonLines(AbstractSource):
    """A file with one JSON object a line, also gzipped; blank lines are no records.

    The first use reads the file once, to find its lines. They may end in ``\\r\\n``; a byte-order mark is dropped.
    """

    def __init__(self, path: epath.Path, name: str, shown: str, field: str):
        self.name = name
        self._shown, self._field = shown, field
        self._file = ByteFile(path)
        self._index: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        """The number of lines that are not blank. Raises `UserError` where the file cannot be read."""
        return len(self._lines()[1])

    def __getitem__(self, index: int) -> Record:
        """The record of one line. Raises `BadRecord`, naming the line as editors count them."""
        starts, lines = self._lines()
        line = int(lines[index])
        start, end = int(starts[line]), int(starts[line + 1])
        data = self._file.read(start, end - start)
        where = f"{self._shown}, line {line + 1}"
        if len(data) < end - start:
            raise BadRecord(where, "the file has become shorter since it was opened")
        return json_record((data.removeprefix(_BOM) if line == 0 else data).strip(), where, self._field)

    def fingerprint(self) -> str:
        """Of the file's bytes and the field."""
        return file_fingerprint(self._file.path, "json lines", self._field)

    def _lines(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each line starts (and the last one ends), and the numbers of the lines that are records."""
        if self._index is None:
            starts, firsts, size, fresh = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)], 0, True
            for chunk in self._file.chunks():
                data = np.frombuffer(chunk, np.uint8)
                begins = np.concatenate([[0] * fresh, np.flatnonzero(data == 10) + 1]).astype(np.int64)
                fresh = bool(data[-1] == 10)
                begins = begins[:-1] if fresh else begins
                starts.append(begins + size)
                firsts.append(data[begins])
                size += len(chunk)
            ends = np.append(np.concatenate(starts), size)
            doubtful = np.isin(np.concatenate(firsts), np.append(_SPACE, _BOM[0]))  # for most, one byte tells
            blank = [line for line in np.flatnonzero(doubtful) if self._is_blank(ends, int(line))]
            self._index = ends, np.delete(np.arange(len(ends) - 1), np.array(blank, np.int64))
        return self._index

    def _is_blank(self, starts: np.ndarray, line: int) -> bool:
        data = self._file.read(int(starts[line]), int(starts[line + 1] - starts[line]))
        return not (data.removeprefix(_BOM) if line == 0 else data).strip()
