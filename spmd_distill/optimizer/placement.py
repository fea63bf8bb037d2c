"""Where every part of a train state lies: moments where their parameters lie, or cut over the batch axes too."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from spmd_distill.errors import UserError
from spmd_distill.optimizer.rule import UpdateRule
from spmd_distill.sharding import REPLICATED, MeshLayout, Spec, Specs
from spmd_distill.types import Params, TrainState

HOST = "pinned_host"
"""The kind of memory that optimizer state is kept in between steps where it is offloaded."""


def state_specs(rule: UpdateRule, abstract: Params, specs: Specs, layout: MeshLayout) -> TrainState:
    """A spec for every leaf of a train state, given those of its parameters."""
    shapes = jax.eval_shape(lambda p: rule.start(p, 0), abstract)
    places = {
        path: (x.shape, spec) for path, x, spec in _with_paths(abstract, moment_specs(rule, abstract, specs, layout))
    }

    def place(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> Spec:
        # A moment has its parameter's path at the end of its own; where it is held in parts, one more name follows.
        for tail in (path[i:end] for i in range(len(path) + 1) for end in (len(path), len(path) - 1)):
            shape, spec = places.get(tail, (None, REPLICATED))
            if shape is not None and x.ndim == len(shape) and x.shape[:-1] == shape[:-1]:
                return layout.fitted(spec, x.shape)
        return REPLICATED

    found = jax.tree_util.tree_map_with_path(place, replace(shapes, params=None))
    return replace(found, params=specs)


def moment_specs(rule: UpdateRule, abstract: Params, specs: Specs, layout: MeshLayout) -> Specs:
    """Where the moments of every parameter lie."""
    if not rule.shard_state:
        return specs
    return jax.tree.map(lambda x, spec: layout.spread(spec, x.shape, layout.batch_axes), abstract, specs)


def on_host(shardings: TrainState, devices: Sequence[Any]) -> TrainState:
    """The shardings of a state whose optimizer state and moving average lie in the memory of the devices' host.

    Raises `UserError` where a device cannot reach such memory.
    """
    kinds = {memory.kind for memory in devices[0].addressable_memories()}
    if HOST not in kinds:
        raise UserError(
            f"optimizer.offload: devices of platform {devices[0].platform} have no {HOST} memory (found "
            f"{', '.join(sorted(kinds))}). Leave it out; optimizer.state: bfloat16 and optimizer.shard_state save "
            f"memory everywhere."
        )
    return replace(
        shardings,
        opt_state=jax.tree.map(lambda s: s.with_memory_kind(HOST), shardings.opt_state),
        ema=jax.tree.map(lambda s: s.with_memory_kind(HOST), shardings.ema),
    )


def _with_paths(tree: Any, specs: Specs) -> list[tuple[tuple[Any, ...], Any, Spec]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    placed = jax.tree.leaves(jax.tree.map(lambda _, spec: (spec,), tree, specs), is_leaf=lambda x: isinstance(x, tuple))
    return [(path, x, spec) for (path, x), (spec,) in zip(leaves, placed, strict=True)]
