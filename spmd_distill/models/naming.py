"""Between a checkpoint's tensors and our parameters: a rule a parameter, read both ways."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

Box: TypeAlias = tuple[slice, ...]
"""A rectangular part of an array: a slice with start and stop a dimension."""


@runtime_checkable
class Sliceable(Protocol):
    """What a box can be read from: an array, or a tensor on disk of which only that box is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def __getitem__(self, box: Any, /) -> np.ndarray:
        """Read a box."""
        ...


@dataclass(frozen=True)
class Turn:
    """How the dimensions of a checkpoint's tensor are made of those of our parameter.

    Written as data, so that every part of the parameter knows which part of the tensor it is: a shard is read without
    the rest. ``dims[i]`` are our dimensions whose product, the first outermost, is the tensor's dimension ``i``:
    ``((1, 2), (0,))`` says that ``[in, heads, head_dim]`` lies there as ``[heads * head_dim, in]``.
    """

    dims: tuple[tuple[int, ...], ...] | None = None
    """None: the same dimensions on both sides."""
    heads: int | None = None
    """The size of the outermost of several dimensions that are one there; checked, never used."""
    rows: int | None = None
    """Rows (dimension 0) of the tensor, where ours has more (zeros) or fewer (it is cut)."""

    def theirs(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in the checkpoint of a parameter of ``shape``."""
        groups = self._groups(len(shape))
        assert self.heads in (None, *(shape[group[0]] for group in groups if len(group) > 1)), (self, shape)
        sizes = tuple(math.prod(shape[d] for d in group) for group in groups)
        return sizes if self.rows is None else (self.rows, *sizes[1:])

    def read(self, tensor: Sliceable, box: Box, shape: Sequence[int], dtype: Any, first_row: int = 0) -> np.ndarray:
        """The part ``box`` of a parameter of ``shape``, out of ``tensor`` from its row ``first_row`` on.

        Reads no more than it needs, but for dimensions that are merged in the checkpoint: of these, only the outermost
        is cut before reading.
        """
        groups = self._groups(len(shape))
        wanted = []
        for group in groups:
            inner = math.prod(shape[d] for d in group[1:])
            wanted.append(slice(box[group[0]].start * inner, box[group[0]].stop * inner))
        if self.rows is not None:
            wanted[0] = slice(min(wanted[0].start, self.rows), min(wanted[0].stop, self.rows))
            if wanted[0].start == wanted[0].stop:
                return np.zeros([_size(s) for s in box], dtype)
        if first_row:
            wanted[0] = slice(wanted[0].start + first_row, wanted[0].stop + first_row)
        found = tensor[tuple(wanted)]
        outermost = {group[0] for group in groups}
        order = [d for group in groups for d in group]
        sizes = {d: _size(box[d]) if d in outermost else shape[d] for d in order}
        if self.rows is not None:
            sizes[groups[0][0]] = found.shape[0]
        found = found.reshape([sizes[d] for d in order]).transpose(np.argsort(order))
        found = found[tuple(slice(None) if d in outermost else s for d, s in enumerate(box))]
        if self.rows is None or found.shape[0] == _size(box[0]):
            return found.astype(dtype, copy=False)
        padded = np.zeros([_size(s) for s in box], dtype)
        padded[: found.shape[0]] = found
        return padded

    def outwards(self, array: np.ndarray) -> np.ndarray:
        """The tensor as it lies in the checkpoint, made of a whole parameter; rows that ours cut off stay away."""
        groups = self._groups(array.ndim)
        turned = array.transpose([d for group in groups for d in group])
        sizes = [math.prod(array.shape[d] for d in group) for group in groups]
        return np.ascontiguousarray(turned.reshape(sizes)[: self.rows])

    def _groups(self, ndim: int) -> tuple[tuple[int, ...], ...]:
        groups = tuple((d,) for d in range(ndim)) if self.dims is None else self.dims
        assert sorted(d for group in groups for d in group) == list(range(ndim)), (self, ndim)
        return groups


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` of a checkpoint's tensor of ``total`` rows that several of our parameters share."""

    start: int
    stop: int
    total: int

    def __post_init__(self):
        assert 0 <= self.start < self.stop <= self.total, self


@dataclass(frozen=True)
class Rule:
    """A tensor's name in the checkpoint, ``{}`` standing for the layer, and how its shape is turned.

    With ``part``, the parameter is only these rows of the tensor; the rules of the other parts have the same name.
    """

    name: str
    turn: Turn
    part: Part | None = None

    @property
    def stacked(self) -> bool:
        """Whether our parameter is a stack of layers, each a tensor of its own there."""
        return "{}" in self.name

    def theirs(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor for a parameter (of one layer) of ``shape``."""
        theirs = self.turn.theirs(shape)
        if self.part is None:
            return theirs
        assert theirs[0] == self.part.stop - self.part.start, (self, theirs)
        return (self.part.total, *theirs[1:])

    def read(self, tensor: Sliceable, box: Box, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """The part ``box`` of a parameter (of one layer) of ``shape``; see `Turn.read`."""
        return self.turn.read(tensor, box, shape, dtype, 0 if self.part is None else self.part.start)


def same() -> Turn:
    """The same array on both sides."""
    return Turn()


def linear() -> Turn:
    """``[out, in]`` in the checkpoint, ``[in, out]`` here."""
    return Turn(((1,), (0,)))


def per_head_out(heads: int) -> Turn:
    """``[heads * head_dim, in]`` in the checkpoint, ``[in, heads, head_dim]`` here."""
    return Turn(((1, 2), (0,)), heads)


def per_head_in(heads: int) -> Turn:
    """``[out, heads * head_dim]`` in the checkpoint, ``[heads, head_dim, out]`` here."""
    return Turn(((2,), (0, 1)), heads)


def per_head_vector(heads: int) -> Turn:
    """``[heads * head_dim]`` in the checkpoint, ``[heads, head_dim]`` here."""
    return Turn(((0, 1),), heads)


def vocab_rows(rows: int, padded: int) -> Turn:
    """``[rows, width]`` in the checkpoint; here ``[padded, width]``, filled up with rows of zeros, or cut."""
    return Turn() if rows == padded else Turn(rows=rows)


def _size(s: slice) -> int:
    return s.stop - s.start
