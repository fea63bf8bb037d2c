"""Looking inside a decoder: named places of a layer, and what is wanted of the arrays that pass there.

A layer says `tap(name, x)` where ``x`` passes. Nobody who listens is the usual case, and costs nothing: the compiled
program is the same. Who listens gives a function for each name it wants; what the functions return comes out of the
scan over layers, stacked.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax

TAPS = {
    "attention_input": "[B, L, D], behind the norm before attention; all tokens of this shard's rows",
    "attention_heads": "[B, L, local heads, C], what each head returns, before the output projection",
    "mlp_input": "[B, L, D], behind the norm before the MLP",
    "mlp_neurons": "[B, L, local neurons], gate times up, before the projection down",
}
"""Every name, and the array that passes there."""

Wanted = Mapping[str, Callable[[jax.Array], Any]]
"""For each name that is wanted: what to keep of its array."""

_listening: ContextVar[tuple[Wanted, dict[str, Any]] | None] = ContextVar("listening", default=None)


@contextlib.contextmanager
def listening(wanted: Wanted) -> Iterator[dict[str, Any]]:
    """Fill the dict it gives while a layer is traced inside the block."""
    assert set(wanted) <= set(TAPS), set(wanted) - set(TAPS)
    found: dict[str, Any] = {}
    token = _listening.set((wanted, found))
    try:
        yield found
    finally:
        _listening.reset(token)


def tap(name: str, x: jax.Array) -> jax.Array:
    """Let whoever listens see ``x``; return it."""
    listener = _listening.get()
    if listener is not None and name in listener[0]:
        listener[1][name] = listener[0][name](x)
    return x
