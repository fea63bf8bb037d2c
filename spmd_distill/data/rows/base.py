"""Rows of tokens: what a loader draws from, wherever it lies."""

import abc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

FIELDS = ("tokens", "labels", "mask", "positions", "segments")
"""Of a row, and of a batch."""


class AbstractRows(abc.ABC):
    """Rows of one length with random access, which need not be in memory."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Tokens of a row (L)."""

    @property
    @abc.abstractmethod
    def valid_tokens(self) -> int:
        """How many positions have a label that counts."""

    @abc.abstractmethod
    def take(self, indices: Sequence[int]) -> "Rows":
        """The rows of these numbers, in this order, in memory."""

    @abc.abstractmethod
    def subset(self, indices: Sequence[int]) -> "AbstractRows":
        """Only the rows of these numbers, in this order."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A sha256 that changes with the content of any row and with their order, as 64 hexadecimal digits."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each source, in the order of their numbers."""
        return (len(self),)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The share of each source in what is drawn, up to a factor; None where every row comes once an epoch."""
        return None

    def identity(self) -> dict[str, Any]:
        """What makes these rows what they are, as plain values: what can be told of two that differ."""
        return {"rows": len(self), "fingerprint": self.fingerprint()}

    def spread(self, count: int) -> "AbstractRows":
        """At most ``count`` rows, spread evenly over all documents."""
        every = max(len(self) // count, 1)
        return self.subset(range(0, len(self), every)[:count])


@dataclass(frozen=True, eq=False)
class Rows(AbstractRows):
    """Packed rows, ready to be drawn in any order: R rows of L tokens, with the fields of ``types.Batch``."""

    tokens: Int32[np.ndarray, "R L"]
    """Token ids; 0 where padded."""
    labels: Int32[np.ndarray, "R L"]
    """The token that follows in the same document; 0 where ``mask`` is False."""
    mask: Bool[np.ndarray, "R L"]
    """True where there is a label: not at padding nor at a document's last token, whatever its id."""
    positions: Int32[np.ndarray, "R L"]
    """Distance to the start of the segment."""
    segments: Int32[np.ndarray, "R L"]
    """The segment's number inside its row, from 1; 0 is padding."""

    def __len__(self) -> int:
        """The number of rows."""
        return self.tokens.shape[0]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One row: its tokens, labels, mask, positions and segments, each a view of shape ``[L]``."""
        return {field.name: getattr(self, field.name)[index] for field in fields(self)}

    @property
    def length(self) -> int:
        """Tokens of a row (L)."""
        return self.tokens.shape[1]

    def take(self, indices: Sequence[int]) -> "Rows":
        """The rows of these numbers, in this order."""
        chosen = np.asarray(indices, np.int64)
        return Rows(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    def subset(self, indices: Sequence[int]) -> "Rows":
        """The same as `take`: these rows are in memory anyway."""
        return self.take(indices)

    @property
    def valid_tokens(self) -> int:
        """How many positions have a label: what a loss over all rows is divided by."""
        return int(np.count_nonzero(self.mask))

    def fingerprint(self) -> str:
        """The sha256 of all that is in the rows, as 64 hexadecimal digits; 10 ms a million tokens."""
        digest = hashlib.sha256(f"rows 1 {self.tokens.shape}".encode())
        for field in fields(self):
            array = np.ascontiguousarray(getattr(self, field.name))
            digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
        return digest.hexdigest()
