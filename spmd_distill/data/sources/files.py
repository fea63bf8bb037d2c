"""The files behind a path, on this machine or another one, and bytes of them from anywhere."""

import difflib
import glob
import gzip
import hashlib
import os
import threading
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

from etils import epath

from spmd_distill.errors import UserError

CHUNK = 1 << 24
"""Bytes that a pass over a file reads at once."""

_WILD = "*?["
_SCHEMES = ("gs", "s3", "az")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path names another machine's store: ``gs://``, ``s3://`` and the like."""
    return "://" in os.fspath(path)


def check_scheme(path: str) -> None:
    """Raise `UserError` for an address that starts with something else than what is read."""
    scheme, mark, _ = path.partition("://")
    if mark and scheme not in _SCHEMES:
        raise UserError(
            f"{path}: found an address of kind {scheme}://, expected {', '.join(f'{s}://' for s in _SCHEMES)}, "
            "hf:// or a path of this machine. Fetch the file first."
        )


def find_files(path: str, suffixes: tuple[str, ...]) -> list[tuple[epath.Path, str]]:
    """The files that a path stands for, in the order of their names, each with the name that messages use.

    A path is a file, a folder (its files with one of ``suffixes``; folders inside it are not searched) or a glob
    (``**`` searches folders, on this machine). A remote file is not looked for: that it exists is seen when it is read.

    Raises:
        UserError: There is no such file, with the nearest name that there is; or none of the files is of a known
        kind.
    """
    given = epath.Path(path)
    try:
        if is_remote(path) and path.lower().endswith(suffixes) and not any(c in path for c in _WILD):
            return [(given, given.name)]
        if given.is_dir():
            found = sorted(file for file in given.iterdir() if file.is_file())
        elif given.exists():
            return [(given, given.name)]
        elif any(c in path for c in _WILD):
            found = _glob(path)
            if not found:
                raise UserError(f"{path}: no file matches this pattern; expected names such as data/*.jsonl.")
        else:
            raise UserError(f"{path}: no such file or folder{nearest_name(given)}")
    except (OSError, ImportError) as error:
        raise unreadable(path, error) from None
    kept = [file for file in found if file.name.lower().endswith(suffixes)]
    if not kept:
        there = ", ".join(file.name for file in found[:5]) or "no file at all"
        raise UserError(
            f"{path}: holds {there}; expected files ending in {', '.join(suffixes)}. "
            "Folders inside a folder are not searched: name them, or use a pattern such as folder/**/*.jsonl."
        )
    return [(file, f"{file.parent.name or file.parent.resolve().name}/{file.name}") for file in kept]


def _glob(path: str) -> list[epath.Path]:
    if not is_remote(path):
        return sorted(epath.Path(found) for found in glob.glob(path, recursive=True) if os.path.isfile(found))
    if "**" in path:
        raise UserError(f"{path}: patterns with ** are searched on this machine alone. Name the folders, or use *.")
    parts = epath.Path(path).parts
    fixed = next(i for i, part in enumerate(parts) if any(c in part for c in _WILD))
    return sorted(file for file in epath.Path(*parts[:fixed]).glob("/".join(parts[fixed:])) if file.is_file())


def nearest_name(path: epath.Path) -> str:
    """How a message about a missing path ends: the folder that there is, and what in it has the nearest name."""
    if is_remote(path):
        return "; check the address."
    missing = path.name
    for folder in path.absolute().parents:
        if folder.is_dir():
            names = sorted(file.name for file in folder.iterdir())
            close = difflib.get_close_matches(missing, names, n=1, cutoff=0.5)
            return f"; did you mean {folder / close[0]}?" if close else f"; {folder} holds nothing of a similar name."
        missing = folder.name
    return "."


def unreadable(path: str | os.PathLike[str], error: Exception) -> UserError:
    """What to raise where the system below (a disk, a network, a missing package) does not give a file."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return UserError(f"{os.fspath(path)}: no such file{nearest_name(epath.Path(path))}")
    return UserError(f"{os.fspath(path)}: cannot be read ({reason}). Check the path and your rights to it.")


class ByteFile:
    """Bytes of a file from anywhere in it, for several threads at once, opened at the first use.

    A local file is read where it lies. A remote one stays open, and reads of it wait for each other. A ``.gz`` is
    decompressed once and held in memory: it has no other way to random access. What is pickled is the path.
    """

    def __init__(self, path: epath.Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._bytes: bytes | None = None
        self._descriptor: int | None = None
        self._remote: Any = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._forget()

    def read(self, start: int, count: int) -> bytes:
        """At most ``count`` bytes from byte ``start``; fewer only at the end. Raises `UserError`."""
        try:
            with self._lock:
                self._open()
                if self._remote is not None:
                    self._remote.seek(start)
                    return self._remote.read(count)
            if self._bytes is not None:
                return self._bytes[start : start + count]
            assert self._descriptor is not None
            pieces = []
            while count > 0 and (piece := os.pread(self._descriptor, min(count, 1 << 30), start)):
                pieces.append(piece)
                start, count = start + len(piece), count - len(piece)
            return b"".join(pieces)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{self.path}: is not a whole gzip file ({error}). Fetch or write it again.") from None
        except (OSError, ImportError) as error:
            raise unreadable(self.path, error) from None

    def chunks(self) -> Iterator[bytes]:
        """The whole file in pieces of `CHUNK` bytes. Raises `UserError`."""
        start = 0
        while piece := self.read(start, CHUNK):
            yield piece
            start += len(piece)

    def _open(self) -> None:
        if self._bytes is not None or self._descriptor is not None or self._remote is not None:
            return
        if self.path.name.lower().endswith(".gz"):
            with self.path.open("rb") as file:
                self._bytes = gzip.decompress(file.read())
        elif is_remote(self.path):
            self._remote = self.path.open("rb")
            weakref.finalize(self, self._remote.close)
        else:
            self._descriptor = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)


def file_fingerprint(path: epath.Path, *about: object) -> str:
    """A sha256 of a file's bytes, and of what else decides the records made of them.

    Of a remote file: of its address, size and time of change, which cost no transfer. Raises `UserError`.
    """
    digest = hashlib.sha256(repr(about).encode())
    try:
        if is_remote(path):
            stat = path.stat()
            digest.update(f"{path} {stat.length} {stat.mtime}".encode())
        else:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except (OSError, ImportError) as error:
        raise unreadable(path, error) from None
    return digest.hexdigest()
