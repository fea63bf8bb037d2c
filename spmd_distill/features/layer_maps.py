"""Layer maps: which layer of the student is compared with which of the teacher.

Layers are counted from 0. Both models have a depth of their own.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from spmd_distill.errors import UserError

Pairs = tuple[tuple[int, int], ...]
"""Layers of the student, each with its layer of the teacher; ascending."""


class AbstractLayerMap(abc.ABC):
    """A rule that makes pairs for any two depths. Subclasses are frozen dataclasses of plain values."""

    @abc.abstractmethod
    def pairs(self, student: int, teacher: int) -> Pairs:
        """The pairs for models of so many layers. Raises `UserError` where there are none such."""


@dataclass(frozen=True)
class Uniform(AbstractLayerMap):
    """``count`` layers of the student at equal distances, each with the teacher's layer at the same relative depth.

    The last layers of both are a pair; layer s is the (s + 1)-th of S, and is compared with the layer that has
    ``round((s + 1) T / S)`` of the teacher's T layers up to and with itself (as in TinyBERT, Jiao et al. 2019,
    arXiv:1909.10351, section 4.2, where S divides T).
    """

    count: int | None = None
    """How many; None is every layer of the student."""

    def pairs(self, student: int, teacher: int) -> Pairs:
        """See the class."""
        count = _counted(self.count, student, "Uniform")
        layers = [_rounded((i + 1) * student, count) - 1 for i in range(count)]
        return tuple((s, max(_rounded((s + 1) * teacher, student), 1) - 1) for s in layers)


@dataclass(frozen=True)
class Last(AbstractLayerMap):
    """The last ``count`` layers of the student with the last of the teacher, one by one from the end."""

    count: int = 1

    def pairs(self, student: int, teacher: int) -> Pairs:
        """See the class."""
        count = _counted(self.count, min(student, teacher), "Last")
        return tuple((student - i, teacher - i) for i in range(count, 0, -1))


@dataclass(frozen=True)
class Explicit(AbstractLayerMap):
    """Pairs as given: (layer of the student, layer of the teacher)."""

    given: Sequence[Sequence[int]]

    def pairs(self, student: int, teacher: int) -> Pairs:
        """See the class."""
        if not self.given:
            raise UserError("Layer pairs: none given; expected at least one, such as [0, 1].")
        for pair in self.given:
            if len(pair) != 2 or not 0 <= pair[0] < student or not 0 <= pair[1] < teacher:
                raise UserError(
                    f"Layer pair {list(pair)}: expected a layer of the student, 0 to {student - 1}, and one of the "
                    f"teacher, 0 to {teacher - 1}; negative numbers are not counted from the end."
                )
        pairs = [(int(s), int(t)) for s, t in self.given]
        if len(set(pairs)) < len(pairs):
            raise UserError(f"Layer pairs {[list(p) for p in pairs]}: one of them is given twice.")
        return tuple(sorted(pairs))


def _counted(count: int | None, most: int, name: str) -> int:
    if count is None:
        return most
    if not 1 <= count <= most:
        raise UserError(f"Layer map {name}: count is {count}; expected 1 to {most}, as many layers as there are.")
    return count


def _rounded(x: int, by: int) -> int:
    """x / by to the nearest whole number, halves up."""
    return (2 * x + by) // (2 * by)
