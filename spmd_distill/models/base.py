"""A model as the step sees it: pure parameters and one function, split from its nnx module once, at the edge."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from spmd_distill.collectives import (
    axis_index,
    axis_size,
    copy_to,
    gather_from,
    gather_param,
    reduce_from,
    scatter_to,
    shard_index,
)
from spmd_distill.models.taps import Tap as Tap
from spmd_distill.models.taps import Wanted as Wanted
from spmd_distill.sharding import MeshLayout, Specs, sharded_axes, spec_axes
from spmd_distill.types import Batch, Params, Unembedded

SUMMED = "summed"
"""The name of what leaves a tensor-parallel block, for remat policies: to compute it again is to send it again."""


@dataclass(frozen=True)
class Shard:
    """The cut of the shard body that a model runs in: which collectives enter and leave a tensor-parallel block."""

    layout: MeshLayout
    dtype: Any
    """Compute type of matmuls and activations."""

    @property
    def tensor_parallel(self) -> int:
        """How many shards lie along ``model``."""
        return self.layout.sizes["model"]

    def enter(self, x: Float[Array, "B Llocal D"]) -> Float[Array, "B L D"]:
        """Into a tensor-parallel block: every shard of ``model`` gets all tokens of its rows."""
        return gather_from(x, "model", 1) if self.layout.sequence_sharded else copy_to(x, "model")

    def leave(self, x: Float[Array, "B L D"]) -> Float[Array, "B Llocal D"]:
        """Out of a tensor-parallel block: partial results are summed over ``model``."""
        summed: Any = scatter_to(x, "model", 1) if self.layout.sequence_sharded else reduce_from(x, "model")
        return checkpoint_name(summed, SUMMED)

    def shared(self, parameter: jax.Array) -> jax.Array:
        """A parameter that every shard of ``model`` holds whole and applies to its own tokens between blocks."""
        return copy_to(parameter, "model") if self.layout.sequence_sharded else parameter

    def materialise(self, params: Params, uses: Any) -> Params:
        """Parameters as a layer uses them: matrices in compute type, whole along ``embed``, gathered if need be.

        Scales and biases stay in the type they are stored in.
        """

        def one(use: Use, x: jax.Array) -> jax.Array:
            if use.partial:
                x = copy_to(x, "model")
            if use.vector:
                return x
            if use.gather_axes:
                return gather_param(x, use.gather_axes, x.ndim - use.from_end, self.dtype)
            return x.astype(self.dtype)

        return jax.tree.map(one, uses, params)


@dataclass(frozen=True)
class Use:
    """How a shard gets at a parameter, derived from its logical axes and where the layout puts it."""

    gather_axes: tuple[str, ...]
    """Mesh axes that its ``embed`` dimension is cut over: it is gathered over them where it is used."""
    from_end: int
    """Which dimension that is, counted from the last (1), so that stacked layers make no difference."""
    partial: bool
    """Every shard of ``model`` holds the whole and uses a part (its heads could not be cut): gradients are summed."""
    vector: bool
    """It has no ``embed`` dimension: a scale or a bias."""


def declare(
    rngs: nnx.Rngs,
    init: Callable[..., jax.Array],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    dtype: Any,
    stack: int | None,
) -> nnx.Param:
    """Declare a parameter once: shape, logical axes, initialiser. ``stack`` puts a ``layers`` dimension in front."""
    lead, lead_axes = ((), ()) if stack is None else ((stack,), ("layers",))
    return nnx.Param(init(rngs.params(), (*lead, *shape), dtype), axes=(*lead_axes, *axes))


class Model:
    """An nnx module split into its structure (held here) and its parameters (passed around as nested plain dicts).

    ``make`` builds the module from `nnx.Rngs`; it is only ever traced, so no array is made before `init`.
    """

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], config: Any):
        self.config = config
        self._make = make
        self._graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
        self.axes: Any = nnx.to_pure_dict(
            jax.tree.map(lambda p: p.replace(p.get_metadata("axes")), state, is_leaf=_is_variable)
        )
        """Logical axes of every parameter, as a tree of tuples."""
        self.abstract: Params = nnx.to_pure_dict(state)
        """Shape and type of every parameter."""

    def init(self, key: jax.Array) -> Params:
        """Random parameters; jit it with ``out_shardings`` and they are born sharded."""
        return nnx.to_pure_dict(nnx.state(self._make(nnx.Rngs(key))))

    def specs(self, layout: MeshLayout) -> Specs:
        """Where ``layout`` puts every parameter; raise `UserError` naming one that does not fit."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x, axes: layout.spec(axes, x.shape, path_name(path)), self.abstract, self.axes
        )

    def uses(self, layout: MeshLayout) -> Any:
        """How a shard body gets at every parameter, as a tree of `Use`."""

        def one(x: jax.ShapeDtypeStruct, axes: tuple[str, ...], spec: Any) -> Use:
            cut = spec_axes(spec, x.ndim)
            dim = axes.index("embed") if "embed" in axes else x.ndim - 1
            gathered = cut[dim] if "embed" in axes else ()
            of_heads = "heads" in axes or "kv_heads" in axes
            partial = of_heads and layout.sizes["model"] > 1 and "model" not in sharded_axes(spec)
            return Use(gathered, x.ndim - dim, partial, "embed" not in axes)

        return jax.tree.map(one, self.abstract, self.axes, self.specs(layout))

    def apply(self, params: Params, batch: Batch, shard: Shard, row_keys: jax.Array | None = None) -> Unembedded:
        """Run on one shard's rows ``[B, L]``: hidden states ``[B * L, D]`` and this shard's unembedding rows.

        ``row_keys`` ``[B]`` (`keys_of_rows`) turn dropout on; a row's key gives its masks.
        """
        module: Any = nnx.merge(self._graphdef, params)
        return module(batch, shard, self.uses(shard.layout), row_keys)

    def apply_cached(self, params: Params, batch: Batch, shard: Shard, cache: Any) -> tuple[Unembedded, Any]:
        """As `apply` with the tokens that ``cache`` remembers before these; the cache with these comes too.

        The first call on an empty cache takes rows of any length, all later ones too. Not under a layout that cuts the
        sequence.
        """
        module: Any = nnx.merge(self._graphdef, params)
        return module(batch, shard, self.uses(shard.layout), None, cache)

    def apply_tapped(
        self, params: Params, batch: Batch, shard: Shard, taps: Wanted, row_keys: jax.Array | None = None
    ) -> tuple[Unembedded, dict[str, Any]]:
        """As `apply`, and for each of ``taps`` what it makes of the arrays that pass there (see `taps.TAPS`).

        What comes back is stacked: ``[layers, ...]``, of all layers or of those that the tap names.
        """
        if not taps:  # nobody looks inside: a model without tap points will do
            return self.apply(params, batch, shard, row_keys), {}
        module: Any = nnx.merge(self._graphdef, params)
        return module(batch, shard, self.uses(shard.layout), row_keys, taps=taps)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, padding rows of the vocabulary included."""
        return sum(x.size for x in jax.tree.leaves(self.abstract))


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as people write it: ``layers.attention.q``."""
    return ".".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path)


def keys_of_rows(key: jax.Array, rows: int, batch_axes: tuple[str, ...], micro_batch: jax.Array | int = 0) -> jax.Array:
    """A random key for each of this shard's ``rows`` rows of a micro-batch, from its number among all rows of the step.

    What is drawn from them depends neither on the layout nor on how a step is cut into micro-batches.
    """
    first = (micro_batch * axis_size(batch_axes) + shard_index(batch_axes)) * rows
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, first + jnp.arange(rows))


def token_keys(keys: jax.Array, length: int, shard: Shard) -> jax.Array:
    """A random key for every token ``[rows, length]`` of this shard, from its row's key and its column in the row."""
    first = axis_index("model") * length if shard.layout.sequence_sharded else 0
    fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))
    return fold(keys, first + jnp.arange(length))


def dropout_factors(
    keys: jax.Array, number: jax.Array, count: int, rate: float, width: int, dtype: Any
) -> Float[Array, "count B L D"]:
    """For each of ``count`` places in layer ``number``: what to multiply an activation ``[B, L, D]`` with."""

    def one(key: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, (count, width))
        return jnp.where(keep, 1 / (1 - rate), 0).astype(dtype)

    return jnp.moveaxis(jax.vmap(jax.vmap(one))(keys), 2, 0)
