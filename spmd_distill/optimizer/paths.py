"""Parameters by patterns for their dotted names, and trees that hold some of the parameters only.

A tree of some parameters has None where the others would be: to JAX and to optax, nothing is there.
"""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

from spmd_distill.errors import UserError
from spmd_distill.models.base import path_name

UNDECAYED = ("*scale", "*bias")
"""Norm scales and biases: a pattern of these may match nothing."""


def matches(tree: Any, patterns: Sequence[str]) -> Any:
    """A tree of bools: whether any of ``patterns`` (``layers.*_norm.*``; a star also spans dots) is a leaf's name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(fnmatchcase(path_name(path), pattern) for pattern in patterns), tree
    )


def check_patterns(tree: Any, patterns: Sequence[str], setting: str) -> None:
    """Raise `UserError` for a pattern that matches no leaf, with the names nearest to it."""
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}."
            raise UserError(f"{setting}: {pattern!r} matches no parameter; {hint}")


def decayed(params: Any, patterns: Sequence[str] = UNDECAYED) -> Any:
    """Which parameters weight decay applies to: all whose name matches none of ``patterns``."""
    return jax.tree.map(lambda found: not found, matches(params, patterns))


def only(kept: Any, tree: Any) -> Any:
    """The leaves (or subtrees) of ``tree`` that ``kept``, a tree of bools, says; None keeps all."""
    return tree if kept is None else jax.tree.map(lambda keep, x: x if keep else None, kept, tree)


def filled(part: Any, whole: Any) -> Any:
    """``part``, with what is not there taken from ``whole``."""
    return jax.tree.map(lambda p, w: w if p is None else p, part, whole, is_leaf=lambda x: x is None)
