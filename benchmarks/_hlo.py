"""Counts what an optimised HLO module does on ONE device: collectives and their bytes, matmul flops, cycles.

``read(compiled.as_text())`` works on the program of any library, and on the text of several XLA versions and backends:

- loops: a ``while`` body counts as often as it runs, by ``known_trip_count`` or by a condition ``i < constant``, from
  0. What a loop with a data-dependent bound does is counted ``unknown_trips`` times, and the loop is named;
- groups: ``{{0,1},{2,3}}``, ``[2,4]<=[8]`` and ``mesh['data'=2,'model'=4] {'model'}``;
- a collective inside a fusion counts once per channel (an asynchronous one is repeated in several fusions), one inside
  an all-reduce-scatter fusion is a reduce-scatter, and of a ``-start`` and ``-done`` pair the start counts;
- of a conditional every branch counts, as if all were taken.

Bytes on the wire are those of a ring of n devices: ``(n - 1) / n`` of the whole array for an all-gather, a
reduce-scatter and an all-to-all, twice that for an all-reduce, and the array itself for a permute. This module does not
import jax.
"""

import collections
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from _hlo_text import Computation, Instruction, Module, dims, elements, parse, size_of

_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Traffic:
    """A number of collectives and, added up over them, bytes of results and bytes on the wire, per device."""

    count: int = 0
    result_bytes: int = 0
    wire_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.count + other.count, self.result_bytes + other.result_bytes, self.wire_bytes + other.wire_bytes
        )


@dataclass(frozen=True)
class Collective:
    """One collective of the program: what it is, between how many devices, and how often it runs."""

    kind: str
    result_bytes: int
    group: int
    times: int
    source: str = ""

    @property
    def traffic(self) -> Traffic:
        n, size = self.group, self.result_bytes
        wire = {
            "all-reduce": 2 * size * (n - 1) / n,
            "reduce-scatter": size * (n - 1),  # the whole array is n results
            "collective-permute": size,
            "collective-broadcast": size,
        }.get(self.kind, size * (n - 1) / n)
        return Traffic(self.times, self.times * size, round(self.times * wire))


@dataclass(frozen=True)
class Program:
    """What `read` finds. ``unknown_loops`` are the loops that were counted ``unknown_trips`` times."""

    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...]
    matmul_flops: int
    """Of every `dot`; matmuls that are custom calls are not among them."""
    estimated_cycles: int
    """The sum of the TPU backend's own estimates; 0 on other backends."""
    custom_calls: dict[str, int] = field(default_factory=dict)
    """Target -> how many calls stand in the text."""

    @property
    def total(self) -> Traffic:
        return sum((c.traffic for c in self.collectives), Traffic())

    @property
    def by_kind(self) -> dict[str, Traffic]:
        found: dict[str, Traffic] = {}
        for c in self.collectives:
            found[c.kind] = found.get(c.kind, Traffic()) + c.traffic
        return found


def read(text: str, *, unknown_trips: int = 1, devices: int | None = None) -> Program:
    """Count a module. ``devices`` is the group of a collective that names none; by default the module's header says."""
    module = parse(text)
    times, unknown = _executions(module, unknown_trips)
    flops = sum(times[name] * _dot_flops(computation) for name, computation in module.computations.items())
    cycles, calls = 0, collections.Counter[str]()
    for name, computation in module.computations.items():
        for instruction in computation.values():
            if found := re.search(r'custom_call_target="([^"]+)"', instruction.rest):
                calls[found[1]] += 1
            if name not in module.fused and (found := re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)):
                cycles += int(found[1]) * times[name]
    collectives = tuple(_collectives(module, times, devices or module.devices))
    return Program(collectives, unknown, flops, cycles, dict(calls))


def memory(compiled: Any) -> dict[str, int]:
    """Bytes a device of a compiled program, from XLA's own analysis: arguments, outputs, what of them is in place."""
    found = compiled.memory_analysis()
    return {name: getattr(found, f"{name}_size_in_bytes") for name in ("temp", "argument", "output", "alias")}


# How often a computation runs


def _executions(module: Module, unknown_trips: int) -> tuple[collections.Counter[str], tuple[str, ...]]:
    """Computation -> how often it runs, and the loops whose trips had to be given."""
    times = collections.Counter({module.entry: 1})
    unknown = []
    for name in _callers_first(module):
        for loop, instruction in module.computations[name].items():
            repeated = 1
            if instruction.opcode == "while":
                trips = _trip_count(module, instruction)
                if trips is None:
                    unknown.append(loop)
                repeated = unknown_trips if trips is None else trips
            if not instruction.opcode.endswith(("-update", "-done")):  # they repeat what their start calls
                for called in instruction.called:
                    times[called] += times[name] * repeated
    return times, tuple(unknown)


def _callers_first(module: Module) -> list[str]:
    done: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in done and name in module.computations:
            for instruction in module.computations[name].values():
                for called in instruction.called:
                    visit(called)
            done[name] = None

    visit(module.entry)
    return list(reversed(done))


def _trip_count(module: Module, loop: Instruction) -> int | None:
    if known := loop.attribute(r'"?known_trip_count"?:\{"?n"?:"?(\d+)'):
        return int(known)
    condition = module.computations.get(loop.attribute(r"\bcondition=%?([\w.\-]+)") or "", {})
    root = next((i for i in condition.values() if i.root), None)
    if root is None:
        return None
    scope, given = condition, root.operands
    if root.opcode == "fusion":  # the comparison itself lies inside, its operands may be the fusion's
        scope = module.computations[root.called[0]]
        root = next(i for i in scope.values() if i.root)
    if root.opcode != "compare":
        return None
    bound = {"LT": -1, "GT": 0}.get(root.attribute(r"direction=(\w+)") or "")
    if bound is None:
        return None
    constant = scope.get(root.operands[bound])
    if constant is not None and constant.opcode == "parameter" and scope is not condition:
        constant = condition.get(given[int(constant.rest.split(")")[0])])
    if constant is None or constant.opcode != "constant":
        return None
    return int(constant.rest.split(")")[0])


# Collectives and matmuls


def _collectives(module: Module, times: collections.Counter[str], devices: int) -> Iterator[Collective]:
    in_fusions: dict[tuple[str, str], Collective] = {}
    for name, computation in module.computations.items():
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in _KINDS or not times[name]:
                continue
            size = size_of(instruction.shape)
            if instruction.opcode.endswith("-start") and kind != "all-reduce":
                size = size_of(elements(instruction.shape)[1])  # (operands, results, ...)
            group = _group_size(instruction, devices)
            if kind == "all-reduce" and "all-reduce-scatter" in name:
                kind, size = "reduce-scatter", size // group
            source = instruction.attribute(r'op_name="([^"]*)"') or ""
            found = Collective(kind, size, group, times[name], source)
            channel = instruction.attribute(r"\bchannel_id=(\d+)")
            if channel is None or name not in module.fused:
                # Outside of fusions one channel may serve many collectives, as those of jax.shard_map do.
                yield found
            elif (key := (kind, channel)) not in in_fusions or (
                in_fusions[key].traffic.result_bytes < found.traffic.result_bytes
            ):
                in_fusions[key] = found
    yield from in_fusions.values()


def _group_size(instruction: Instruction, devices: int) -> int:
    if listed := instruction.attribute(r"replica_groups=\{\{([\d,]*)\}"):
        return len(listed.split(","))
    if iota := instruction.attribute(r"replica_groups=\[\d+,(\d+)\]<="):
        return int(iota)
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", instruction.rest)
    if mesh is None:
        return devices
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
    # An axis may be cut: 'x':(2)4 is the part of size 4 of it that lies inside its first 2 pieces.
    named = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
    return math.prod(int(part) if part else sizes[axis] for axis, part in named)


def _dot_flops(computation: Computation) -> int:
    flops = 0
    for instruction in computation.values():
        if instruction.opcode == "dot":
            left = dims(computation[instruction.operands[0]].shape)
            contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
            depth = math.prod(left[int(d)] for d in contracted.split(",") if d)
            flops += 2 * math.prod(dims(instruction.shape)) * depth
    return flops
