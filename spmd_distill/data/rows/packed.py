"""Rows that are laid out by a plan and put together when they are asked for."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from spmd_distill.data.rows.base import AbstractRows, Rows
from spmd_distill.data.rows.plan import Plan
from spmd_distill.data.rows.table import TokenTable


class PackedRows(AbstractRows):
    """The rows of a plan over a table of tokens, which may lie on disk: only what is taken comes into memory."""

    def __init__(self, table: TokenTable, plan: Plan, chosen: np.ndarray | None = None, packing: str | None = None):
        """Serve the rows of ``plan``, or those of the numbers ``chosen``; ``packing`` is the plan's name."""
        self.table, self.plan, self.packing = table, plan, packing
        self._chosen = np.arange(len(plan)) if chosen is None else np.asarray(chosen, np.int64)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._chosen)

    @property
    def length(self) -> int:
        """Tokens of a row (L)."""
        return self.plan.length

    @cached_property
    def valid_tokens(self) -> int:
        """How many positions have a label that counts."""
        return int(self.plan.valid[self._chosen].sum())

    @property
    def density(self) -> float:
        """The share of the rows' positions that hold a token."""
        return self.plan.density

    def subset(self, indices: Sequence[int]) -> "PackedRows":
        """Only the rows of these numbers, in this order."""
        return PackedRows(self.table, self.plan, self._chosen[np.asarray(indices, np.int64)], self.packing)

    def take(self, indices: Sequence[int]) -> Rows:
        """The rows of these numbers, in this order, in memory."""
        plan, table, length = self.plan, self.table, self.length
        rows = self._chosen[np.asarray(indices, np.int64)]
        firsts, counts = plan.rows[rows], plan.rows[rows + 1] - plan.rows[rows]
        row = np.repeat(np.arange(len(rows)), counts)
        of_row = np.cumsum(counts) - counts  # the number of each row's first piece among all that are taken
        nth = np.arange(len(row)) - of_row[row]
        piece = firsts[row] + nth
        sizes = plan.sizes[piece].astype(np.int64)
        before = np.cumsum(sizes) - sizes
        positions = np.arange(int(sizes.sum())) - np.repeat(before, sizes)
        source = np.repeat(plan.starts[piece], sizes) + positions
        target = np.repeat(row * length + before - before[of_row[row]] if len(row) else row, sizes) + positions

        following = np.minimum(source + 1, max(len(table.tokens) - 1, 0))
        counted = np.array(table.loss[following])
        last = before + sizes - 1
        counted[last[~plan.goes_on[piece]]] = False
        values = {
            "tokens": table.tokens[source],
            "labels": np.where(counted, table.tokens[following], 0),
            "mask": counted,
            "positions": positions,
            "segments": np.repeat(nth + 1, sizes),
        }
        fields: dict[str, Any] = {}
        for name, found in values.items():
            flat = np.zeros(len(rows) * length, bool if name == "mask" else np.int32)
            flat[target] = found
            fields[name] = flat.reshape(len(rows), length)
        return Rows(**fields)

    def fingerprint(self) -> str:
        """The sha256 of the table's own and of the plan; no token is read."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        plan = self.plan
        digest = hashlib.sha256(f"packed 1 {plan.length} {self.table.sha256}".encode())
        for array in (plan.starts, plan.sizes, plan.goes_on, plan.rows, self._chosen):
            array = np.ascontiguousarray(array)
            digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
        return digest.hexdigest()

    def identity(self) -> dict[str, Any]:
        """What the text was made into rows with, one plain value each, and the fingerprint of all of it."""
        packing = {} if self.packing is None else {"pack": self.packing}
        return {**self.table.made_of, "length": self.length, **packing, **super().identity()}
