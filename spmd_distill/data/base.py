"""What the parts of the data pipeline hand to each other: records, examples, and what they say of a bad one."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from spmd_distill.errors import UserError


class BadRecord(UserError):
    """One record that cannot be used; a run file says whether it is skipped and counted, or ends the run."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


@dataclass(frozen=True)
class Record:
    """One record of a source, as it was read."""

    value: Mapping[str, Any]
    """Its fields: ``text``; ``prompt`` and ``completion``; or ``messages``."""
    where: str
    """Names it in messages: ``chat.jsonl, line 17``."""


class AbstractSource(abc.ABC):
    """Records with random access, in an order that does not change."""

    name: str
    """What metrics and mixtures call it."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of records, bad ones included."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Record:
        """One record. Raises `BadRecord` where it cannot be read."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A sha256 of what the source holds, as 64 hexadecimal digits."""


@dataclass(frozen=True, eq=False)
class Example:
    """One record as tokens: what is packed into rows."""

    tokens: Int32[np.ndarray, " n"]
    loss: Bool[np.ndarray, " n"]
    """True for tokens that the student learns to produce. Nothing comes before the first one, so its value is void."""
