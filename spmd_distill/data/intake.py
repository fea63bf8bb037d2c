"""Reading a source through: what becomes of bad records, and what is said of them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spmd_distill.data.base import AbstractSource, BadRecord, Example
from spmd_distill.data.encode import Encoder, check_choice
from spmd_distill.errors import UserError

OnBad = Literal["error", "skip"]
"""A bad record ends the run, or is left out and counted."""


@dataclass(frozen=True)
class IntakeReport:
    """What was read of a source."""

    source: str
    """Its name."""
    records: int
    """Records that were asked for, bad ones included."""
    examples: int
    tokens: int
    learned: int
    """Tokens that count in the loss: all that are marked, but the first of an example."""
    cut: int
    """Examples that were cut to the most tokens that an example may have."""
    bad: dict[str, int]
    """Reason (its first words, up to the colon) -> how many records."""
    first: tuple[str, ...]
    """The first bad records, as ``where: reason``."""

    def lines(self) -> list[str]:
        """For people: a line of counts, and if records were skipped their reasons and the first of them."""
        skipped = sum(self.bad.values())
        cut = f", {self.cut:,} cut" if self.cut else ""
        counts = f"{self.tokens:,} tokens, {self.learned:,} learned"
        lines = [f"{self.source}: {self.examples:,} of {self.records:,} records used, {counts}{cut}"]
        if skipped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.bad.items())
            lines += [f"  skipped {skipped:,}: {reasons}", *(f"  {line}" for line in self.first)]
            if skipped > len(self.first):
                lines.append(f"  and {skipped - len(self.first):,} more")
        return lines


class Intake:
    """A source and an encoder: examples, without the bad records or with an error at the first of them.

    Args:
        source: The records.
        encoder: Makes examples of them.
        on_bad: "error" raises at the first bad record, which names its file and line. "skip" leaves it out and
            counts it.
        keep: So many bad records are named in the report.
    """

    def __init__(self, source: AbstractSource, encoder: Encoder, on_bad: OnBad = "error", keep: int = 5):
        check_choice("on_bad", on_bad, OnBad)
        self.source, self.encoder = source, encoder
        self._on_bad, self._keep = on_bad, keep
        self._records = self._examples = self._tokens = self._learned = self._cut = 0
        self._bad: Counter[str] = Counter()
        self._first: list[str] = []

    def __len__(self) -> int:
        """The number of records, bad ones included."""
        return len(self.source)

    def example(self, index: int) -> Example | None:
        """The example of one record, or None for a bad one that is skipped. Counts it.

        Raises:
            BadRecord: The record is bad, and ``on_bad`` is "error".
            UserError: The file as a whole cannot be read.
        """
        self._records += 1
        cut = self.encoder.cut
        try:
            example = self.encoder(self.source[index])
        except BadRecord as error:
            if self._on_bad == "error":
                raise
            self._bad[error.reason.partition(":")[0]] += 1
            if len(self._first) < self._keep:
                self._first.append(f"{error.where}: {error.reason}")
            return None
        self._examples += 1
        self._tokens += len(example.tokens)
        self._learned += int(np.count_nonzero(example.loss[1:]))
        self._cut += self.encoder.cut - cut
        return example

    def __iter__(self) -> Iterator[Example]:
        """All examples, in the order of their records.

        Raises:
            BadRecord: The first bad record, where ``on_bad`` is "error".
            UserError: There is no record, or all of them are bad.
        """
        good = 0
        for index in range(len(self.source)):
            example = self.example(index)
            if example is not None:
                good += 1
                yield example
        if not good:
            if not len(self.source):
                raise UserError(f"{self.source.name}: holds no record. Leave it out, or fill it.")
            raise UserError(
                f"{self.source.name}: all {len(self.source)} records are bad. The first: {'; '.join(self._first)}"
            )

    def report(self) -> IntakeReport:
        """What was read up to now."""
        return IntakeReport(
            self.source.name,
            self._records,
            self._examples,
            self._tokens,
            self._learned,
            self._cut,
            dict(self._bad.most_common()),
            tuple(self._first),
        )
