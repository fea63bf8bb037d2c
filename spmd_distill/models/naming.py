"""Between a checkpoint's tensors and our parameters: a rule a tensor, both ways, one tensor at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmd_distill.errors import UserError
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models.base import Model, path_name
from spmd_distill.sharding import is_spec
from spmd_distill.types import Params


@dataclass(frozen=True)
class Turn:
    """How a checkpoint's array becomes ours (``inwards``) and back (``outwards``), and the shape it has there."""

    inwards: Callable[[np.ndarray], np.ndarray]
    outwards: Callable[[np.ndarray], np.ndarray]
    theirs: Callable[[tuple[int, ...]], tuple[int, ...]]


@dataclass(frozen=True)
class Rule:
    """A tensor's name in the checkpoint, ``{}`` standing for the layer, and how its shape is turned."""

    name: str
    turn: Turn


def same() -> Turn:
    """The same array on both sides."""
    return Turn(lambda w: w, lambda w: w, lambda s: s)


def linear() -> Turn:
    """``[out, in]`` in the checkpoint, ``[in, out]`` here."""
    return Turn(lambda w: w.T, lambda w: w.T, lambda s: s[::-1])


def per_head_out(heads: int) -> Turn:
    """``[heads * head_dim, in]`` in the checkpoint, ``[in, heads, head_dim]`` here."""
    return Turn(
        lambda w: w.T.reshape(w.shape[1], heads, -1),
        lambda w: w.reshape(w.shape[0], -1).T,
        lambda s: (s[1] * s[2], s[0]),
    )


def per_head_in(heads: int) -> Turn:
    """``[out, heads * head_dim]`` in the checkpoint, ``[heads, head_dim, out]`` here."""
    return Turn(
        lambda w: w.T.reshape(heads, -1, w.shape[0]),
        lambda w: w.reshape(-1, w.shape[-1]).T,
        lambda s: (s[2], s[0] * s[1]),
    )


def vocab_rows(rows: int, padded: int) -> Turn:
    """``[rows, width]`` in the checkpoint; here padded with rows of zeros, or cut."""
    return Turn(
        lambda w: np.concatenate([w, np.zeros((padded - rows, w.shape[1]), w.dtype)]) if padded > rows else w[:padded],
        lambda w: w[:rows],
        lambda s: (rows, s[1]),
    )


def load_params(
    model: Model,
    rules: Mapping[str, Rule],
    weights: Mapping[str, np.ndarray],
    mapper: AbstractMapper,
    layers: Sequence[int] | None = None,
    source: str = "checkpoint",
) -> Params:
    """Read a checkpoint straight into device shards, one parameter at a time.

    ``layers`` names the checkpoint's layers to take, in order (default: all). ``weights`` is read lazily; tensors
    nobody asked for are ignored. Raises `UserError` for a missing tensor or a wrong shape, naming both.
    """

    def read(name: str, expected: tuple[int, ...], turn: Turn) -> np.ndarray:
        try:
            array = weights[name]
        except KeyError:
            raise UserError(f"{source}: the tensor {name!r} is missing.") from None
        if array.shape != expected:
            raise UserError(f"{source}: tensor {name!r} has shape {array.shape}, expected {expected}.")
        return turn.inwards(array)

    def one(path: Any, leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        rule = rules[path_name(path)]
        if "{}" in rule.name:
            shape = leaf.shape[1:]
            numbers = range(leaf.shape[0]) if layers is None else layers
            parts = [read(rule.name.format(i), rule.turn.theirs(shape), rule.turn) for i in numbers]
            whole = np.stack(parts)
        else:
            whole = read(rule.name, rule.turn.theirs(leaf.shape), rule.turn)
        whole = whole.astype(leaf.dtype, copy=False)
        assert whole.shape == leaf.shape, (path, whole.shape, leaf.shape)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: whole[index])

    shardings = mapper.shardings(model.specs(mapper.layout))
    return jax.tree_util.tree_map_with_path(one, model.abstract, shardings, is_leaf=is_spec)


def export_params(params: Params, rules: Mapping[str, Rule]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield ``(checkpoint name, array)`` for every tensor, gathering one parameter at a time to the host."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        rule, whole = rules[path_name(path)], np.asarray(leaf)
        if "{}" in rule.name:
            for i, part in enumerate(whole):
                yield rule.name.format(i), np.ascontiguousarray(rule.turn.outwards(part))
        else:
            yield rule.name, np.ascontiguousarray(rule.turn.outwards(whole))
