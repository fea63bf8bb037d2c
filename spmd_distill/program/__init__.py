"""A program before it runs: compiled once, with the memory it needs, and the floating-point operations it asks for."""

from spmd_distill.program.compiled import Compiled, Memory, abstract_like, compile_program

__all__ = ["Compiled", "Memory", "abstract_like", "compile_program"]
