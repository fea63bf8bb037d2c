"""A place in a mapped GGUF file, and reads that check what is left before they take or allocate anything."""

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from spmd_distill.errors import UserError

AGAIN = "The file is damaged or was not fully downloaded: fetch it again."
"""The fix for most bad files."""

_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_STRINGS = 1 << 21  # eight times the largest vocabulary in use


class Cursor:
    """Reads one value after another. ``what`` names, for the error message, what is being read.

    Every method raises `UserError` where the file ends too early or holds something else.
    """

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.at = 0
        """The next byte to read."""

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file."""
        return len(self.data) - self.at

    def take(self, count: int, what: str) -> int:
        """Step over ``count`` bytes and return where they began."""
        if count > self.left:
            raise UserError(
                f"{self.path}: ends inside {what}: {count} bytes expected from byte {self.at} on, "
                f"{self.left} found. {AGAIN}"
            )
        self.at += count
        return self.at - count

    def check_count(self, what: str, count: int, least: int) -> None:
        """Refuse a count of things of at least ``least`` bytes each for which there is no room."""
        if count * least > self.left:
            raise UserError(
                f"{self.path}: claims {count} {what}, which need at least {count * least} bytes, "
                f"but only {self.left} are left. {AGAIN}"
            )

    def integer(self, size: int, what: str) -> int:
        """Read an unsigned number of 4 or 8 bytes."""
        return struct.unpack_from("<I" if size == 4 else "<Q", self.data, self.take(size, what))[0]

    def string(self, what: str, at_most: int | None = None) -> str:
        """Read a length of 8 bytes and that many bytes of UTF-8."""
        length = self.integer(8, what)
        if at_most is not None and length > at_most:
            raise UserError(f"{self.path}: {what} has {length} bytes, expected at most {at_most}. {AGAIN}")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path}: {what} at byte {start} is not UTF-8 ({error.reason}), expected text. {AGAIN}"
            ) from None

    def value(self, what: str) -> Any:
        """Read a type and a value of it: a number, bool or str, a numpy array, or a list of str."""
        code = self.integer(4, what)
        if code == _STRING:
            return self.string(what)
        if code == _ARRAY:
            return self._array(what)
        return self._numbers(what, code, 1)[0].item()

    def _array(self, what: str) -> np.ndarray | list[str]:
        code, count = self.integer(4, what), self.integer(8, what)
        if code == _ARRAY:  # they are in the format and in no model
            raise UserError(f"{self.path}: {what} is an array of arrays, expected numbers or text in it. {AGAIN}")
        if code != _STRING:
            return self._numbers(what, code, count)
        if count > _MAX_STRINGS:
            raise UserError(f"{self.path}: {what} claims {count} strings, expected at most {_MAX_STRINGS}. {AGAIN}")
        self.check_count(f"strings in {what}", count, 8)
        return self._strings(what, count)

    def _strings(self, what: str, count: int) -> list[str]:
        """Read many strings in one loop, for a vocabulary and its merges are a hundred thousand."""
        found: list[str] = []
        length, data, size = struct.Struct("<Q").unpack_from, self.data, len(self.data)
        try:
            while len(found) < count:
                start = self.at + 8
                stop = start + length(data, self.at)[0]
                if stop > size:
                    break
                found.append(data[start:stop].decode())
                self.at = stop
        except (struct.error, UnicodeDecodeError):
            pass  # the next line meets it again
        return found if len(found) == count else [self.string(what)]  # which says what is wrong

    def _numbers(self, what: str, code: int, count: int) -> np.ndarray:
        if code not in _DTYPES:
            known = ", ".join(str(known) for known in sorted([*_DTYPES, _STRING, _ARRAY]))
            raise UserError(f"{self.path}: {what} has value type {code}, expected one of {known}. {AGAIN}")
        dtype = np.dtype(_DTYPES[code])
        return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize, what)).copy()
