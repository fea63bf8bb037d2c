"""A program before it runs, and while: the memory it needs, the operations it asks for, what it sends, its time."""

from spmd_distill.program.compiled import Compiled, Memory, abstract_like, compile_program
from spmd_distill.program.flops import analytic_flops, count_flops, step_flops
from spmd_distill.program.peaks import published_peak
from spmd_distill.program.trace import DeviceTime, device_time, read_trace
from spmd_distill.program.wire import quieter_layout, wire_bytes

__all__ = [
    "Compiled",
    "DeviceTime",
    "Memory",
    "abstract_like",
    "analytic_flops",
    "compile_program",
    "count_flops",
    "device_time",
    "published_peak",
    "quieter_layout",
    "read_trace",
    "step_flops",
    "wire_bytes",
]
