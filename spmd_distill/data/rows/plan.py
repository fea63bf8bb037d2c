"""Which piece of which example lies in which row, as index arrays: nothing is copied before a row is asked for."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64

from spmd_distill.data.rows.table import TokenTable
from spmd_distill.errors import UserError

WINDOW = 2048
"""So many pieces are sorted by size at a time. Larger ones fill rows better, and move text further from its place."""
_BLOCK = 1 << 22


@dataclass(frozen=True, eq=False)
class Plan:
    """P pieces of a table's examples, laid into R rows of ``length`` tokens."""

    length: int
    starts: Int64[np.ndarray, " P"]
    """Where in the table each piece begins."""
    sizes: Int32[np.ndarray, " P"]
    """Tokens of each piece."""
    goes_on: Bool[np.ndarray, " P"]
    """Whether the token after the piece belongs to the same example, so that the piece's last token has a label."""
    rows: Int64[np.ndarray, " _"]
    """Row r holds the pieces ``rows[r]`` to ``rows[r + 1]``, each as a segment."""
    valid: Int64[np.ndarray, " R"]
    """Labels that count in each row."""

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.rows) - 1

    @property
    def density(self) -> float:
        """The share of the rows' positions that hold a token; the rest is padding."""
        return float(self.sizes.sum(dtype=np.int64)) / max(len(self) * self.length, 1)


def plan(table: TokenTable, length: int, how: str, documents: np.ndarray | None = None) -> Plan:
    """Lay the examples of a table into rows; every label that counts is in exactly one of them.

    Args:
        table: the examples.
        length: tokens of a row (L).
        how: ``first_fit`` takes the examples of a window by falling size and puts each into the first row that has
            room; ``none`` gives each example rows of its own. Both cut an example only where it is longer than a row,
            leave out what no counted label follows (the last token, which is only ever a label; a turn of the user at
            the end), and pieces without a counted label. ``concatenate`` lays all examples one after another and cuts
            wherever a row is full, as `pack` does.
        documents: numbers of the examples to take, ascending; None: all.

    Raises:
        UserError: ``length`` is below 1, or ``how`` is unknown.
    """
    if length < 1:
        raise UserError(f"row length: found {length}, expected at least 1 token (such as 512).")
    chosen = np.arange(len(table)) if documents is None else np.asarray(documents, np.int64)
    begins, ends = np.asarray(table.offsets)[chosen], np.asarray(table.offsets)[chosen + 1]
    if how == "concatenate":
        return _concatenate(table, length, begins, ends)
    if how not in ("first_fit", "none"):
        raise UserError(f"packing: found {how!r}, expected first_fit, concatenate or none.")
    starts, sizes, valid = _pieces(table, length, begins, ends)
    if how == "none":
        order, rows = np.arange(len(sizes)), np.arange(len(sizes) + 1)
    else:
        row = first_fit(sizes, length)
        order = np.argsort(row, kind="stable")
        rows = np.searchsorted(row[order], np.arange(row.max(initial=-1) + 2))
    goes_on = np.ones(len(sizes), bool)
    return Plan(length, starts[order], sizes[order], goes_on, rows.astype(np.int64), _per_row(valid[order], rows))


def first_fit(sizes: Int32[np.ndarray, " P"], length: int, window: int = WINDOW) -> Int64[np.ndarray, " P"]:
    """The row of each piece: first-fit decreasing within each window of pieces, rows in the order of their first piece.

    No two rows of a window could be one: where the sizes are mixed, hardly any room is left.
    """
    found = np.empty(len(sizes), np.int64)
    made = 0
    for first in range(0, len(sizes), window):
        part = sizes[first : first + window]
        room = np.full(len(part), length)
        row = np.empty(len(part), np.int64)
        for piece in np.argsort(-part, kind="stable"):
            size = part[piece]
            row[piece] = fitting = np.argmax(room >= size)  # rows not begun have room for anything
            room[fitting] -= size
        _, earliest, number = np.unique(row, return_index=True, return_inverse=True)
        rank = np.empty(len(earliest), np.int64)
        rank[np.argsort(earliest)] = np.arange(len(earliest))
        found[first : first + window] = made + rank[number.reshape(-1)]
        made += len(earliest)
    return found


def _pieces(table: TokenTable, length: int, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, ...]:
    """Starts, sizes and counted labels of the pieces of examples that are cut every ``length`` tokens."""
    inputs = np.maximum(ends - begins - 1, 0)  # the last token is only a label
    count = -(-inputs // length)
    example = np.repeat(np.arange(len(begins)), count)
    nth = np.arange(len(example)) - np.repeat(np.cumsum(count) - count, count)
    starts = begins[example] + nth * length
    valid, sizes = _labels(table, starts, np.minimum(length, ends[example] - 1 - starts))
    used = valid > 0
    return starts[used], sizes[used].astype(np.int32), valid[used]


def _concatenate(table: TokenTable, length: int, begins: np.ndarray, ends: np.ndarray) -> Plan:
    long = ends - begins > 1
    begins, ends = begins[long], ends[long]
    until = np.cumsum(ends - begins)  # ends of the examples in the stream of all
    since = until - (ends - begins)
    total = int(until[-1]) if len(until) else 0
    firsts = np.arange(0, total, length)
    cuts = np.union1d(since, firsts).astype(np.int64)
    sizes = np.diff(cuts, append=total)
    example = np.searchsorted(until, cuts, side="right")
    starts = begins[example] + cuts - since[example]
    goes_on = cuts + sizes != until[example]
    rows = np.append(np.searchsorted(cuts, firsts), len(cuts)).astype(np.int64)
    valid, _ = _labels(table, starts, sizes - ~goes_on)
    return Plan(length, starts, sizes.astype(np.int32), goes_on, rows, _per_row(valid, rows))


def _labels(table: TokenTable, starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each piece, how many of its tokens have a label that counts, and up to where the last of these is."""
    valid, reach = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
    (filled,) = np.nonzero(sizes)
    begins, ends = starts[filled] + 1, starts[filled] + sizes[filled] + 1  # of the labels
    edges = np.arange(0, len(table.tokens) + _BLOCK, _BLOCK)
    for first, last in zip(*(np.searchsorted(begins, edges)[i:][: len(edges) - 1] for i in (0, 1)), strict=True):
        if first == last:
            continue
        here, low = filled[first:last], begins[first]
        flags = np.append(table.loss[low : ends[last - 1]], False)
        where = np.stack([begins[first:last], ends[first:last]], axis=1).reshape(-1) - low
        valid[here] = np.add.reduceat(flags, where, dtype=np.int64)[::2]
        latest = np.maximum.reduceat(np.where(flags, np.arange(len(flags)), -1), where)[::2]
        reach[here] = np.maximum(latest + 1 - where[::2], 0)
    return valid, reach


def _per_row(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    sums = np.concatenate([[0], np.cumsum(values)])
    return sums[rows[1:]] - sums[rows[:-1]]
