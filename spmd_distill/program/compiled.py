"""Compiling ahead of the first call: one executable, what it needs, and what XLA says of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Memory:
    """Bytes that a compiled program needs on each device, as XLA planned them."""

    arguments: int
    """What is handed to it: for a training step parameters, moments, the teacher and the batch."""
    outputs: int
    temporaries: int
    """What is alive only while it runs: activations, gradients, a chunk's logits."""
    aliased: int
    """Outputs that take the place of donated arguments; they are in `arguments` and in `outputs`."""
    code: int

    @property
    def total(self) -> int:
        """Bytes while it runs: arguments, temporaries, code, and the outputs that have a place of their own."""
        return self.arguments + self.temporaries + self.code + self.outputs - self.aliased


@dataclass(frozen=True)
class Compiled:
    """One compiled program: called like the function it was made of, with arguments of the very types it was made for.

    Arguments of another shape, type or sharding are refused (TypeError or ValueError), where a jitted function would
    silently compile again.
    """

    call: Callable[..., Any]
    memory: Memory | None
    """None where the backend does not say."""
    cost: dict[str, float]
    """XLA's own figures for one device, such as ``flops`` and ``bytes accessed``; empty where it has none. The body of
    a loop counts once, however often it runs, so that these are far below what a model with scanned layers does."""
    seconds: float
    """How long tracing and compiling took."""

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.call(*args)


def compile_program(function: Callable[..., Any], *args: Any) -> Compiled:
    """Compile a jitted function for arguments like these, without running it.

    Args:
        function: what `jax.jit` returned.
        args: its arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings for what is not there yet.
    """
    began = time.monotonic()
    jitted: Any = function
    executable = jitted.lower(*args).compile()
    return Compiled(executable, _memory(executable), _cost(executable), time.monotonic() - began)


def abstract_like(tree: Any, shardings: Any) -> Any:
    """Shapes, types and places of the arrays of ``tree`` as they will lie on devices: no array is made."""
    canonical = jax.dtypes.canonicalize_dtype
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, canonical(x.dtype), sharding=s), tree, shardings)


def _memory(executable: Any) -> Memory | None:
    try:
        found = executable.memory_analysis()
    except (NotImplementedError, RuntimeError):  # a backend without it
        return None
    if found is None:
        return None
    names = ("argument", "output", "temp", "alias", "generated_code")
    return Memory(*(int(getattr(found, f"{name}_size_in_bytes")) for name in names))


def _cost(executable: Any) -> dict[str, float]:
    try:
        found = executable.cost_analysis()
    except (NotImplementedError, RuntimeError):
        return {}
    found = found[0] if isinstance(found, list) and found else found
    return {str(k): float(v) for k, v in found.items()} if isinstance(found, dict) else {}
