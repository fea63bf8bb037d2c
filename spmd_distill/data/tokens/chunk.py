"""A range of a source's records as tokens: the unit that processes share, and that survives an interruption."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spmd_distill.data.base import AbstractSource, Example
from spmd_distill.data.encode import Encoder
from spmd_distill.data.intake import Intake, IntakeReport, OnBad
from spmd_distill.data.rows.table import COLUMNS, columns

_NAMED = 5


@dataclass(frozen=True, eq=False)
class Chunk:
    """The examples of some records in a row."""

    arrays: dict[str, np.ndarray]
    """The columns of a `TokenTable`."""
    report: IntakeReport

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self.arrays["tokens"])

    def save(self, path: Path) -> None:
        """Write it so that it is there whole or not at all."""
        said = json.dumps(dataclasses.asdict(self.report))
        half = path.with_suffix(f".{os.getpid()}")
        with half.open("wb") as file:
            np.savez(file, report=np.array(said), **self.arrays)  # pyright: ignore[reportArgumentType]
        half.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Chunk | None":
        """What `save` wrote; None where there is nothing, or nothing whole."""
        try:
            with np.load(path) as found:
                arrays = {name: found[name] for name in COLUMNS}
                return cls(arrays, report_of(json.loads(str(found["report"]))))
        except Exception:  # whatever a damaged archive is answered with, it is made again
            return None


@dataclass(frozen=True)
class Job:
    """What a process needs to make chunks."""

    source: AbstractSource
    encoder: Encoder
    on_bad: OnBad

    def chunk(self, first: int, last: int) -> Chunk:
        """Encode records ``first`` to ``last``. Raises `BadRecord` for a bad one that may not be skipped."""
        intake = Intake(self.source, self.encoder, self.on_bad, keep=_NAMED)
        arrays = columns(_examples(intake, first, last))
        return Chunk(arrays, intake.report())


def _examples(intake: Intake, first: int, last: int) -> Iterator[Example]:
    for index in range(first, last):
        example = intake.example(index)
        if example is not None:
            yield example


def report_of(values: dict[str, Any]) -> IntakeReport:
    """A report from what `dataclasses.asdict` made of it."""
    return IntakeReport(**{**values, "first": tuple(values["first"])})


def joined(reports: Sequence[IntakeReport]) -> IntakeReport:
    """The report of all records that these are of, in order."""
    bad: Counter[str] = Counter()
    for report in reports:
        bad.update(report.bad)
    counts = {
        name: sum(getattr(report, name) for report in reports)
        for name in ("records", "examples", "tokens", "learned", "cut")
    }
    named = tuple(line for report in reports for line in report.first)[:_NAMED]
    return IntakeReport(source=reports[0].source, bad=dict(bad.most_common()), first=named, **counts)
