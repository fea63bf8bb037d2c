"""Compiles for TPUs that are not there, and reads off the program what its compiler says about it.

`prepare` must come before jax is imported. `measure` compiles a traced function; its figures are per device:

- memory: what the program allocates, from `memory_analysis`. Temporaries are those in HBM: what the compiler places in
  the 128 MiB of VMEM is not among them;
- cycles: the sum of the backend's own ``estimated_cycles``, of a loop's body as often as it runs, at `CLOCK`. Nothing
  overlaps in that sum, and a collective or a custom kernel has no estimate;
- optimal: XLA's roofline ``optimal_seconds``, which counts a loop's body once (`optimal_of_loop` puts that right) and
  books -1 s for each ``ConcatBitcast`` (put right here; a float32 sum of many of them loses digits);
- collectives and the bytes they put on the wire of a ring, from the text of the program (`_hlo`).
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _hlo import Program, memory, read

GIB = 2**30
TFLOPS, CLOCK = 197e12, 1.5e9
"""Of a v5e chip: bfloat16 flops a second, and the clock that 4 units of 128 x 128 need for so many."""
LINK = 45e9
"""Bytes a second over one link of the interconnect, one way."""
HBM = 15.75
"""GiB of a v5e chip's 16 that the compiler gives to a program."""
INSTALL = "pip install 'jax[tpu]'"


class NoCompiler(Exception):
    """No TPU compiler can be had here; the message says why and what to install."""


def prepare(dump: Path | None = None) -> None:
    """Set what jax and libtpu must find when they are loaded; with ``dump``, XLA writes its memory plans there."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no machine to ask what it is
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name, value in (("ACCELERATOR_TYPE", "v5litepod-8"), ("WORKER_HOSTNAMES", "localhost"), ("WORKER_ID", "0")):
        os.environ.setdefault(f"TPU_{name}", value)  # unset, libtpu complains at length
    for level in ("TF_CPP_MIN_LOG_LEVEL", "TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):
        os.environ.setdefault(level, "3")
    if dump is not None:
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def devices(topology: str) -> list[Any]:
    """The devices of a topology such as ``v5e:2x4``. Raises `NoCompiler`."""
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:
        told = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise NoCompiler(f"no TPU compiler for {topology} here; {INSTALL} brings it ({told[:90]})") from error


@dataclass(frozen=True)
class Figures:
    """What the compiler says about a program, per device."""

    temp: float
    """GiB of temporaries in HBM."""
    argument: float
    output: float
    alias: float
    """GiB of outputs that are written over arguments."""
    peak: float
    """GiB, arguments included, that XLA calls the peak. It is less than `total`; by what, XLA does not say."""
    optimal: float
    """Seconds; every loop's body counted once."""
    program: Program
    per_trip: float
    """Collectives of one trip of the loops whose trips had to be given."""

    @property
    def total(self) -> float:
        """GiB in use while it runs."""
        return self.temp + self.argument + self.output - self.alias

    @property
    def cycles(self) -> float:
        """Seconds."""
        return self.program.estimated_cycles / CLOCK

    @property
    def wire(self) -> float:
        """GiB."""
        return self.program.total.wire_bytes / GIB


def measure(traced: Any, trips: int = 1) -> Figures:
    """Compile; loops with a data-dependent bound (the head's) are counted ``trips`` times."""
    compiled = traced.lower().compile()
    text = compiled.as_text()
    program = read(text, unknown_trips=trips)
    more = read(text, unknown_trips=trips + 1)
    costs = compiled.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    optimal = costs.get("optimal_seconds", math.nan) + program.custom_calls.get("ConcatBitcast", 0)
    sizes = {name: size / GIB for name, size in memory(compiled).items()}
    return Figures(
        **sizes,
        peak=compiled.memory_analysis().peak_memory_in_bytes / GIB,
        optimal=optimal,
        program=program,
        per_trip=more.total.count - program.total.count,
    )


# The head's loop over chunks


def chunk_of(traced: Any, rows: int, width: int) -> int:
    """Tokens a chunk: those that a loop's matmul with a teacher's unembedding ``[rows, width]`` takes at once."""
    found = {
        shape[0]
        for loop in _equations(traced.jaxpr.jaxpr)
        if loop.primitive.name in ("while", "scan")
        for matmul in _equations(loop.params.get("body_jaxpr", loop.params.get("jaxpr")).jaxpr)
        if matmul.primitive.name == "dot_general" and (rows, width) in (shapes := [v.aval.shape for v in matmul.invars])
        for shape in shapes
        if shape != (rows, width)
    }
    if len(found) != 1:
        raise ValueError(f"expected one size of chunks in the head's loop, found {sorted(found)}")
    return found.pop()


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def optimal_of_loop(trace: Callable[[], Any], whole: Figures, trips: int) -> float:
    """Optimal seconds with the one loop of a program counted ``trips`` times.

    What lies outside of the loop is the same program with the loop left out; the rest of ``whole`` is one trip.
    """
    with _without_loops():
        outside = measure(trace()).optimal
    return outside + trips * (whole.optimal - outside)


@contextlib.contextmanager
def _without_loops() -> Iterator[None]:
    """While this is open, a `fori_loop` or `while_loop` that is traced only hands its start through."""
    from jax import lax

    kept = lax.fori_loop, lax.while_loop
    lax.fori_loop = lambda lower, upper, body, start, **_: lax.optimization_barrier(start)
    lax.while_loop = lambda condition, body, start: lax.optimization_barrier(start)
    try:
        yield
    finally:
        lax.fori_loop, lax.while_loop = kept
