"""Reads the text of an HLO module: computations, their instructions, and the sizes of shapes.

Only what `_hlo` counts is read. The texts of different XLA versions and backends differ in details that matter here:
layouts with tiles in parentheses, tuples with index comments, computations with and without a signature.
"""

import functools
import math
import re
from dataclasses import dataclass

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:called_computations|branch_computations)=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    """Everything after the opcode's opening parenthesis: operands and attributes."""
    root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """Computations this instruction runs, a loop's body among them."""
        lists = (name for names in _CALLED_LIST.findall(self.rest) for name in re.findall(r"[\w.\-]+", names))
        return tuple(_CALLED.findall(self.rest)) + tuple(lists)

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.rest)
        return found[1] if found else None


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: str
    devices: int

    @functools.cached_property
    def fused(self) -> set[str]:
        return {
            name
            for computation in self.computations.values()
            for instruction in computation.values()
            if instruction.opcode == "fusion"
            for name in instruction.called
        }


def parse(text: str) -> Module:
    computations: dict[str, Computation] = {}
    entry, inside = "", None
    header = text.split("\n", 1)[0]
    counts = [int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)]
    for line in text.splitlines():
        if inside is None:
            if not line.startswith("HloModule") and (found := _COMPUTATION.match(line)):
                inside = computations[found[2]] = {}
                entry = found[2] if found[1] else entry
        elif line.startswith("}"):
            inside = None
        elif found := _INSTRUCTION.match(line):
            root, name, shape, opcode, rest = found.groups()
            operands = re.findall(r"%([\w.\-]+)", _until_closed(rest))
            inside[name] = Instruction(shape, opcode, tuple(operands), rest, bool(root))
    if not entry:
        raise ValueError("This is no HLO text: it has no ENTRY computation.")
    return Module(computations, entry, math.prod(counts))


def _until_closed(text: str) -> str:
    """The text before the parenthesis that closes an already open one."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:i]
    return text


def elements(shape: str) -> list[str]:
    """The elements of a tuple shape, one level deep; an array is its own only element."""
    if not shape.startswith("("):
        return [shape]
    elements, depth, start = [], 0, 1
    for i, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            elements.append(shape[start:i].strip())
            start = i + 1
    return elements


def dims(shape: str) -> list[int]:
    found = _ARRAY.search(shape)
    return [int(d) for d in found[2].split(",") if d] if found else []


def size_of(shape: str) -> int:
    bits = 0
    for dtype, dims in _ARRAY.findall(shape):
        width = _BITS[dtype] if dtype in _BITS else int(re.findall(r"\d+", dtype)[0])
        bits += width * math.prod(int(d) for d in dims.split(",") if d)
    return bits // 8
