"""A program before it runs: compiled once, with the memory it needs, and the floating-point operations it asks for."""

from spmd_distill.program.compiled import Compiled, Memory, abstract_like, compile_program
from spmd_distill.program.flops import analytic_flops, count_flops, step_flops
from spmd_distill.program.peaks import published_peak

__all__ = [
    "Compiled",
    "Memory",
    "abstract_like",
    "analytic_flops",
    "compile_program",
    "count_flops",
    "published_peak",
    "step_flops",
]
