"""Read GGUF, the one-file format of llama.cpp: metadata, tokenizer and (quantised) tensors.

The file is little-endian: magic ``GGUF``, version, number of tensors, number of metadata pairs, the pairs,
one record a tensor (name, dimensions with the fastest first, type, offset), padding, the tensors. It is
mapped, not read. Every count is held against the bytes that are left before anything is allocated, so a
damaged file costs a sentence.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from spmd_distill.errors import UserError
from spmd_distill.interop.cursor import AGAIN, Cursor
from spmd_distill.interop.ggml import TENSOR_TYPES, UNREAD_TYPES, dequantize

T = TypeVar("T", int, float, str, bool, list)
D = TypeVar("D")

_MAX_DIMENSIONS = 4  # ggml's own limit
_MAX_NAME = 65535  # the format's own limit, in bytes
_CODE_OF = {kind.name: code for code, kind in TENSOR_TYPES.items()}
_REQUIRED: Any = object()


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Row-major, numpy's order: ``(out, in)`` for a linear layer."""
    type: str
    """Storage format, such as ``Q8_0``."""
    offset: int
    """First byte, from the start of the file."""
    nbytes: int


@dataclass(frozen=True, eq=False)
class GGUF:
    """An open GGUF file. The mapping is released with the last reference."""

    path: Path
    metadata: Mapping[str, Any]
    """Scalars as Python values, arrays of numbers as numpy arrays, arrays of strings as lists."""
    tensors: Mapping[str, TensorInfo]
    _data: mmap.mmap

    def tensor(self, name: str) -> np.ndarray:
        """Read and dequantise one tensor: a new float32 array of ``tensors[name].shape``.

        Raises `UserError` where the file has no tensor of that name.
        """
        if name not in self.tensors:
            raise UserError(f"{self.path}: holds no tensor {name!r} ({len(self.tensors)} others). {_RECONVERT}")
        info = self.tensors[name]
        raw = memoryview(self._data)[info.offset : info.offset + info.nbytes]
        return dequantize(raw, TENSOR_TYPES[_CODE_OF[info.type]], info.shape)

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: D) -> T | D: ...
    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Return one metadata value, checked to be of ``kind`` (int, float, str, bool or list).

        Without a default the key is required. Raises `UserError` for a missing key or a value of another
        kind.
        """
        value = self.metadata.get(key, default)
        if value is _REQUIRED:
            raise UserError(f"{self.path}: metadata {key!r} is missing, expected {kind.__name__}. {_RECONVERT}")
        if value is default:
            return value
        if isinstance(value, np.ndarray) and kind is list:
            return value.tolist()
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            found = f"an array of {len(value)}" if isinstance(value, list | np.ndarray) else repr(value)
            raise UserError(f"{self.path}: metadata {key!r} is {found}, expected {kind.__name__}. {_RECONVERT}")
        return value


_RECONVERT = "Convert the model again with llama.cpp's convert_hf_to_gguf.py, or pick another GGUF file."


def open_gguf(path: str | os.PathLike[str]) -> GGUF:
    """Map a GGUF file (version 2 or 3) and read its metadata and tensor table; no tensor is read yet.

    Raises `UserError` naming the file, what was found, what was expected and the fix, for a file that is
    missing, empty, not GGUF, of another version, truncated, inconsistent, or holds a tensor type that is not
    read here.
    """
    path = Path(path)
    data = _map(path)
    cursor = Cursor(path, data)
    tensor_count, pair_count = _read_header(cursor)
    cursor.check_count("metadata pairs", pair_count, 13)  # a key of no bytes, a type, one byte of value
    cursor.check_count("tensors", tensor_count, 24)  # a name of no bytes, no dimension, type, offset
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string("a metadata key", at_most=_MAX_NAME)
        if key in metadata:
            raise UserError(f"{path}: metadata {key!r} is there twice, expected once. {AGAIN}")
        metadata[key] = cursor.value(f"metadata {key!r}")
    records: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name, record = _read_record(cursor)
        if name in records:
            raise UserError(f"{path}: tensor {name!r} is there twice, expected once. {AGAIN}")
        records[name] = record
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise UserError(f"{path}: metadata 'general.alignment' is {alignment!r}, expected a power of two. {AGAIN}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _locate(path, name, record, start, alignment, len(data)) for name, record in records.items()}
    _check_overlap(path, tensors)
    return GGUF(path, metadata, tensors, data)


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise UserError(f"{path}: is empty (0 bytes), expected a GGUF file. {AGAIN}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file, expected a GGUF file. Check the path.") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, expected a GGUF file. Name the .gguf file inside it.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be opened: {error.strerror}. Make it a readable file.") from None


def _read_header(cursor: Cursor) -> tuple[int, int]:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        fix = "Give a file converted by llama.cpp."
        if magic == b"vers":
            fix = "It looks like a Git LFS pointer: run `git lfs pull`."
        raise UserError(f"{cursor.path}: is not GGUF: it starts with {magic!r}, expected b'GGUF'. {fix}")
    cursor.at = 4
    version = cursor.integer(4, "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        found = f"a big-endian file of version {swapped}" if swapped in (2, 3) else f"version {version}"
        raise UserError(f"{cursor.path}: is {found}, expected little-endian GGUF of version 2 or 3. {_RECONVERT}")
    return cursor.integer(8, "the number of tensors"), cursor.integer(8, "the number of metadata pairs")


def _read_record(cursor: Cursor) -> tuple[str, tuple[tuple[int, ...], int, int]]:
    name = cursor.string("a tensor name", at_most=_MAX_NAME)
    what = f"tensor {name!r}"
    rank = cursor.integer(4, what)
    if not 1 <= rank <= _MAX_DIMENSIONS:
        raise UserError(f"{cursor.path}: {what} has {rank} dimensions, expected 1 to {_MAX_DIMENSIONS}. {AGAIN}")
    shape = tuple(reversed([cursor.integer(8, what) for _ in range(rank)]))
    return name, (shape, cursor.integer(4, what), cursor.integer(8, what))


def _locate(
    path: Path, name: str, record: tuple[tuple[int, ...], int, int], start: int, alignment: int, size: int
) -> TensorInfo:
    shape, code, offset = record
    if code not in TENSOR_TYPES:
        raise UserError(
            f"{path}: tensor {name!r} is stored as {UNREAD_TYPES.get(code, 'an unknown type')} (type "
            f"{code}), expected one of {', '.join(sorted(_CODE_OF))}. Use another file of the same model, "
            "such as its Q8_0 or F16."
        )
    kind = TENSOR_TYPES[code]
    if shape[-1] % kind.block or math.prod(shape) == 0:
        raise UserError(
            f"{path}: tensor {name!r} has shape {shape}, expected no zero and, for {kind.name}, "
            f"rows of a multiple of {kind.block}. {AGAIN}"
        )
    nbytes = math.prod(shape) // kind.block * kind.layout.itemsize
    if offset % alignment or start + offset + nbytes > size:
        raise UserError(
            f"{path}: tensor {name!r} ({kind.name}, shape {shape}) lies at bytes {start + offset} to "
            f"{start + offset + nbytes}, expected a start that is a multiple of {alignment} from byte "
            f"{start} and an end within the file's {size} bytes. {AGAIN}"
        )
    return TensorInfo(name, shape, kind.name, start + offset, nbytes)


def _check_overlap(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    for first, second in pairwise(ordered):
        if first.offset + first.nbytes > second.offset:
            raise UserError(
                f"{path}: tensor {second.name!r} starts at byte {second.offset}, inside tensor "
                f"{first.name!r}, which ends at {first.offset + first.nbytes}; expected them apart. {AGAIN}"
            )
