"""The one shape in which weights enter the library: named tensors, read one at a time or a box at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_distill.errors import UserError


@dataclass(frozen=True)
class Entry:
    """One tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    """Read it whole."""
    view: Callable[[], Any] | None = None
    """Something with a ``shape``, of which a tuple of slices reads that part; None where only the whole can be read."""
    file: str | None = None
    """The file it lies in, where the checkpoint has several."""


class MissingTensorError(UserError, KeyError):
    """A tensor was asked for that the checkpoint does not hold. A `KeyError` too, as a mapping owes it."""

    __str__ = Exception.__str__  # KeyError would print the repr of the sentence


class Weights(Mapping[str, np.ndarray]):
    """Tensors of a checkpoint by name, on disk until they are asked for.

    ``weights[name]`` reads that one tensor into host memory and keeps nothing, so a caller that goes through
    the names holds one tensor at a time and can place each on its devices before it reads the next. Shapes
    and dtypes are known without reading. Two look-ups of one name read twice.
    """

    def __init__(self, source: str, entries: Mapping[str, Entry]):
        self.source = source
        """Where the tensors come from, for error messages: the path of a file or folder."""
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> np.ndarray:
        """Read one tensor. Raises `MissingTensorError` (`UserError` and `KeyError`) for an unknown name."""
        entry = self._entry(name)
        array = entry.read()
        assert (array.shape, array.dtype) == (entry.shape, entry.dtype), (name, array.shape, array.dtype, entry)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"Weights({len(self)} tensors of {self.source})"

    def names(self) -> list[str]:
        """Return every tensor name, in the order of the file."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the row-major shape of a tensor, ``(out, in)`` for a linear layer, without reading it."""
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype that reading gives, without reading: the stored one, or float32 if quantised."""
        return self._entry(name).dtype

    def view(self, name: str) -> Any:
        """Return a tensor of which boxes (tuples of slices with a start and a stop) can be read, each from disk.

        Where its format cannot be read in parts, that is the whole tensor as an array, read now and once.
        """
        entry = self._entry(name)
        return self[name] if entry.view is None else entry.view()

    def where(self, name: str) -> str:
        """Return the file that holds a tensor, for error messages."""
        return self._entry(name).file or self.source

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise MissingTensorError(
                f"{self.source}: holds no tensor {name!r} (it holds {len(self)} tensors, {_few(self._entries)}). "
                "The checkpoint belongs to another architecture, or part of it is missing."
            )
        return self._entries[name]


def _few(names: Mapping[str, Entry]) -> str:
    first = [repr(name) for name in list(names)[:3]]
    return ", ".join([*first, "..."] if len(names) > len(first) else first) or "none"
