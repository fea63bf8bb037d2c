"""What devices did while steps ran, from a profiler's trace: how long they worked, how long they only communicated.

A trace has a plane a device, ``/device:GPU:0`` or ``/device:TPU:0``, with lines of operations. Of a device's window,
from its first operation to its last::

    busy           the time in which at least one operation runs / window
    communication  the time in which a collective runs and no other operation does / window

so that a collective that hides behind a matmul costs nothing. A CPU's trace has no such planes: what its threads do for
several simulated devices is not measurable as theirs.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

_KINDS = {
    "all-reduce": r"all-?reduce",
    "all-gather": r"all-?gather",
    "reduce-scatter": r"reduce-?scatter",
    "all-to-all": r"all-?to-?all",
    "collective-permute": r"collective-?permute|send-?recv",
    "collective": r"collective|nccl|rccl",
}
"""Kind -> how XLA or the library of the devices calls it; the first that fits counts."""
_OPERATIONS = re.compile(r"(Async )?XLA Ops|Stream\b.*")
"""Lines that hold operations; others hold whole steps and programs."""

Span = tuple[float, float]


@dataclass(frozen=True)
class DeviceTime:
    """Means over the devices of a trace."""

    seconds: float
    """The window."""
    busy: float
    """Share of it, 0 to 1."""
    communication: float
    """Share of it, 0 to 1: collectives that hide behind nothing."""
    kinds: dict[str, float]
    """The same by the kind of collective, largest first; where two run at once, both count."""


def read_trace(folder: str | Path) -> DeviceTime | None:
    """The device times of what `jax.profiler.start_trace` left in a folder; None where it holds no device."""
    planes = []
    for file in sorted(Path(folder).rglob("*.xplane.pb")):
        planes += jax.profiler.ProfileData.from_file(str(file)).planes
    return device_time(planes)


def device_time(planes: Iterable[Any]) -> DeviceTime | None:
    """See `read_trace`; ``planes`` as `jax.profiler.ProfileData` has them."""
    found = [one for plane in planes if plane.name.startswith("/device:") and (one := _of_device(plane)) is not None]
    if not found:
        return None
    kinds = {kind: sum(one.kinds.get(kind, 0.0) for one in found) / len(found) for kind in _KINDS}
    ranked = sorted(((kind, share) for kind, share in kinds.items() if share > 0), key=lambda pair: -pair[1])
    seconds, busy, communication = (
        sum(getattr(one, name) for one in found) / len(found) for name in ("seconds", "busy", "communication")
    )
    return DeviceTime(seconds, busy, communication, dict(ranked))


def _of_device(plane: Any) -> DeviceTime | None:
    compute, collectives = [], dict[str, list[Span]]()
    for line in plane.lines:
        if not _OPERATIONS.fullmatch(line.name):
            continue
        for event in line.events:
            span = event.start_ns, event.start_ns + event.duration_ns
            kind = next((kind for kind, name in _KINDS.items() if re.search(name, event.name, re.IGNORECASE)), None)
            (compute if kind is None else collectives.setdefault(kind, [])).append(span)
    everything = _union([*compute, *(span for spans in collectives.values() for span in spans)])
    if not everything:
        return None
    window = everything[-1][1] - everything[0][0]
    working = _union(compute)
    exposed = {kind: _length(_union([*working, *spans])) - _length(working) for kind, spans in collectives.items()}
    communication = _length(everything) - _length(working)
    shares = {kind: nanoseconds / window for kind, nanoseconds in exposed.items()}
    return DeviceTime(window / 1e9, _length(everything) / window, communication / window, shares)


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
