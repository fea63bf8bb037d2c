"""The loss that `head.py` measures, from hidden states: its sizes, its inputs, and the one formula all must agree on.

The loss is the mean over valid tokens of ``alpha T^2 KL(teacher || student) + (1 - alpha) CE(labels)``, with KL at
temperature T; wanted are its value and its gradients by the student's hidden states and unembedding. It is imported by
workers in other environments, so this module needs nothing but numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TEMPERATURE, ALPHA = 2.0, 0.5
MASKS = {"all": 1, "half": 2}
"""Name -> one of how many tokens counts in the loss."""


@dataclass(frozen=True)
class Problem:
    """N tokens, hidden states of width Ds (student) and Dt (teacher), V rows of each unembedding, in float32."""

    tokens: int = 2048
    vocab: int = 32768
    student: int = 256
    teacher: int = 512

    def as_flags(self) -> list[str]:
        """The flags that a worker makes the same problem of."""
        return [f"--{name}={value}" for name, value in vars(self).items()]

    def inputs(self) -> tuple[np.ndarray, ...]:
        """Hidden state and unembedding of the student, then of the teacher; labels. Logits have a deviation of 2."""
        draw = np.random.default_rng(0)

        def normal(rows: int, width: int, deviation: float) -> np.ndarray:
            return draw.standard_normal((rows, width), np.float32) * np.float32(deviation)

        made = []
        for width in (self.student, self.teacher):
            made += [normal(self.tokens, width, 1.0), normal(self.vocab, width, 2.0 * width**-0.5)]
        return (*made, draw.integers(0, self.vocab, self.tokens, dtype=np.int32))

    def mask(self, name: str) -> np.ndarray:
        """Which tokens count: all, or a random half."""
        mask = np.zeros(self.tokens, bool)
        mask[np.random.default_rng(1).permutation(self.tokens)[: self.tokens // MASKS[name]]] = True
        return mask

    @property
    def gradient_bytes(self) -> int:
        """Of the student's hidden states and unembedding."""
        return 4 * self.student * (self.tokens + self.vocab)


def add_flags(parser: Any, names: Sequence[str] = ("tokens", "vocab", "student", "teacher")) -> None:
    for name in names:
        parser.add_argument(f"--{name}", type=int, default=getattr(Problem, name))


def from_flags(options: Any) -> Problem:
    return Problem(options.tokens, options.vocab, options.student, options.teacher)
