"""Several sources of rows as one stream: which row is sample i, as a pure function of i."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

import grain
import numpy as np

from spmd_distill.data.rows.base import FIELDS, AbstractRows, Rows
from spmd_distill.errors import UserError

_PARTS = 10_000
"""Weights are rounded to so many parts of their sum, unless they are that exactly."""


class Mixture(AbstractRows):
    """The rows of several sources, numbered one source after another."""

    def __init__(self, parts: Mapping[str, AbstractRows], weights: Sequence[float] | None = None):
        """Put together ``parts``, by their names.

        Args:
            parts: rows of one length, none empty.
            weights: the share of each in what a `Loader` draws, up to a factor; None draws every row once an epoch.

        Raises:
            UserError: there is no part, one has no rows, the lengths differ, or a weight is not above 0.
        """
        if not parts:
            raise UserError("a mixture of no sources: expected at least one.")
        for name, part in parts.items():
            if not len(part):
                raise UserError(f"source {name!r} has no row to learn from; leave it out.")
        lengths = {name: part.length for name, part in parts.items()}
        if len(set(lengths.values())) > 1:
            raise UserError(f"rows of one mixture must have one length; found {lengths}.")
        if weights is not None:
            integer_shares(weights)
            if len(weights) != len(parts):
                raise UserError(f"found {len(weights)} weight(s) for {len(parts)} source(s); expected one each.")
        self.parts = dict(parts)
        self._weights = None if weights is None else tuple(weights)
        self._ends = np.cumsum([len(part) for part in parts.values()])

    def __len__(self) -> int:
        """The number of rows of all sources."""
        return int(self._ends[-1])

    @property
    def length(self) -> int:
        """Tokens of a row (L)."""
        return next(iter(self.parts.values())).length

    @property
    def valid_tokens(self) -> int:
        """How many positions have a label that counts."""
        return sum(part.valid_tokens for part in self.parts.values())

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each source."""
        return tuple(len(part) for part in self.parts.values())

    @property
    def weights(self) -> tuple[float, ...] | None:
        """As given."""
        return self._weights

    def take(self, indices: Sequence[int]) -> Rows:
        """The rows of these numbers, in this order, in memory."""
        numbers = np.asarray(indices, np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of {len(self)}")
        source = np.searchsorted(self._ends, numbers, side="right")
        fields: dict[str, Any] = {
            name: np.zeros((len(numbers), self.length), bool if name == "mask" else np.int32) for name in FIELDS
        }
        for number, part in enumerate(self.parts.values()):
            (here,) = np.nonzero(source == number)
            if here.size:
                rows = part.take((numbers[here] - (self._ends[number] - len(part))).tolist())
                for name, array in fields.items():
                    array[here] = getattr(rows, name)
        return Rows(**fields)

    def subset(self, indices: Sequence[int]) -> Rows:
        """The same as `take`."""
        return self.take(indices)

    def fingerprint(self) -> str:
        """The sha256 of the parts' own, in order, and of the weights."""
        parts = [part.fingerprint() for part in self.parts.values()]
        return hashlib.sha256(f"mixture 1 {self._weights} {parts}".encode()).hexdigest()

    def identity(self) -> dict[str, Any]:
        """The parts' own, each value under the source's name, their weights, and the fingerprint of all."""
        found: dict[str, Any] = {"sources": list(self.parts)}
        for number, (name, part) in enumerate(self.parts.items()):
            found |= {f"{name}.{key}": value for key, value in part.identity().items()}
            if self._weights is not None:
                found[f"{name}.weight"] = self._weights[number]
        return found | super().identity()


class Order:
    """Which row each sample of an endless stream is. Asking changes nothing.

    Without weights, each run of all rows (an epoch) holds every row once. With weights, the sources take turns as
    evenly as their shares allow: of the first n samples, whatever n, each source has its share to within the number
    of sources. Inside a source, each run of its rows holds every one once: it goes through epochs of its own.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None, seed: int, shuffle: bool):
        """Of sources with ``sizes`` rows, numbered one source after another; see `Loader` for the rest."""
        self._sizes = tuple(sizes)
        self._shares = None if weights is None else integer_shares(weights)
        self._offsets = np.cumsum([0, *sizes])
        # One seed a source: with the same one, sources of one size would be in the same order.
        streams = [(sum(sizes), seed)]
        if self._shares is not None:
            streams = [(size, _seed(seed, number)) for number, size in enumerate(sizes)]
        self._streams = [_stream(size, start, shuffle) for size, start in streams]

    def rows(self, first: int, count: int) -> list[int]:
        """The rows behind samples ``first`` to ``first + count``."""
        if self._shares is None:
            return [int(cast(int, self._streams[0][i])) for i in range(first, first + count)]
        before = self._counts(np.arange(first, first + count + 1))
        source = np.argmax(np.diff(before, axis=0) > 0, axis=1)
        key = before[np.arange(count), source]
        return [
            int(self._offsets[s]) + int(cast(int, self._streams[s][int(k)])) for s, k in zip(source, key, strict=True)
        ]

    def epochs(self, sample: int) -> list[float]:
        """How often each source has been gone through before ``sample``; without weights, all of them as one."""
        if self._shares is None:
            return [sample / sum(self._sizes)] * len(self._sizes)
        counts = self._counts(np.array([sample]))[0]
        return [int(n) / size for n, size in zip(counts, self._sizes, strict=True)]

    def _counts(self, samples: np.ndarray) -> np.ndarray:
        """Of the first n samples, how many are each source's: ``[len(samples), sources]``, each row sums to n.

        The first source gets its share of n, rounded up; the others share what is left in the same way. Both parts grow
        by at most one with n, so exactly one source grows at each sample.
        """
        assert self._shares is not None
        left, remaining, found = samples.astype(np.int64), sum(self._shares), []
        for share in self._shares:
            rest = left * (remaining - share) // remaining
            found.append(left - rest)
            left, remaining = rest, remaining - share
        return np.stack(found, axis=1)


def integer_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the ratio of the weights: exactly where they are small, else to 1/10,000 of their sum.

    Raises:
        UserError: a weight is not a number above 0.
    """
    for weight in weights:
        if not 0 < weight < math.inf:
            raise UserError(f"a source has weight {weight}; expected a number above 0.")
    exact = [Fraction(repr(float(weight))) for weight in weights]
    whole = [int(fraction * math.lcm(*(f.denominator for f in exact))) for fraction in exact]
    divisor = math.gcd(*whole)
    whole = [number // divisor for number in whole]
    if sum(whole) > _PARTS:
        total = sum(exact)
        whole = [max(1, round(fraction / total * _PARTS)) for fraction in exact]
    return tuple(whole)


def _stream(size: int, seed: int, shuffle: bool) -> grain.MapDataset:
    order = grain.MapDataset.range(size).seed(seed)
    return (order.shuffle() if shuffle else order).repeat()


def _seed(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
