"""Which buffers are alive where a program's temporaries are largest, from XLA's text dumps of its memory plan.

XLA writes the dumps with ``XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text"``, one set a program.
"""

import re
from dataclasses import dataclass
from pathlib import Path

PLAN, LIVE = "-buffer-assignment.txt", "-live-range.txt"
MIB = 2**20


@dataclass(frozen=True)
class Buffer:
    """A value inside of an allocation, and the part of the schedule in which it is alive."""

    name: str
    shape: str
    size: int
    offset: int
    born: int
    dies: int


def largest(folder: Path, least: float) -> list[str]:
    """Of every program dumped: lines with the buffers of ``least`` MiB or more at the peak of its HBM temporaries."""
    lines = []
    for plan in sorted(folder.glob(f"*after_optimizations{PLAN}")):
        stem = str(plan).removesuffix(PLAN)
        schedule = Path(stem + LIVE).read_text()
        ranges = {
            name + (index or "{}"): (int(born), int(dies))
            for name, index, born, dies in re.findall(r"^\s+([\w.\-]+)(\{[\d,]*\})?:(\d+)-(\d+)$", schedule, re.M)
        }
        order = {int(i): name for i, name in re.findall(r"^\s+(\d+):([\w.\-]+)$", schedule, re.M)}
        sources = _sources(Path(stem + ".txt").read_text())
        for allocation in re.split(r"\n(?=allocation )", plan.read_text()):
            head = allocation.split("\n", 1)[0]
            if "preallocated-temp" not in head or "color" in head:  # another colour is another kind of memory
                continue
            buffers = _buffers(allocation, ranges)
            peak, when = _peak(buffers)
            if peak < least * MIB:
                continue
            lines.append(f"{Path(stem).name}: {peak / MIB:.0f} MiB of temporaries at {order.get(when, when)}")
            lines += _alive(buffers, when, least, sources)
    return lines


def _buffers(allocation: str, ranges: dict[str, tuple[int, int]]) -> list[Buffer]:
    value = r"value: <\d+ ([\w.\-]+)\s*(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): ([^{\n]*)"
    return [
        Buffer(name, shape, int(size), int(offset), *ranges[name + (index or "{}")])
        for name, index, size, offset, shape in re.findall(value, allocation)
        if name + (index or "{}") in ranges
    ]


def _peak(buffers: list[Buffer]) -> tuple[int, int]:
    """The most bytes that are alive at once, and when; values at one offset share their bytes."""
    best = (0, 0)
    for time in sorted({b.born for b in buffers}):
        sizes: dict[int, int] = {}
        for b in buffers:
            if b.born <= time <= b.dies:
                sizes[b.offset] = max(sizes.get(b.offset, 0), b.size)
        best = max(best, (sum(sizes.values()), time), key=lambda found: found[0])
    return best


def _alive(buffers: list[Buffer], when: int, least: float, sources: dict[str, str]) -> list[str]:
    alive = [b for b in buffers if b.born <= when <= b.dies and b.size >= least * MIB]
    seen: dict[int, str] = {}
    for b in sorted(alive, key=lambda b: -b.size):
        seen.setdefault(b.offset, f"  {b.size / MIB:9.1f} MiB  {b.shape:32} {b.name:32} {sources.get(b.name, '')}")
    return list(seen.values())


def _sources(hlo: str) -> dict[str, str]:
    """Instruction -> the end of the operation's name in the Python program."""
    found = re.findall(r'^\s+(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', hlo, re.M)
    return {name: source[-100:] for name, source in found}
