"""Models that are not ours: any function of parameters and a batch, cut by XLA's partitioner.

A `Model` is written for one shard and calls collectives. A `ForeignModel` knows nothing of shards: its function gets
global arrays, and only says where its parameters lie. So it runs around the shard body and not inside it
(`Distillation.gradients`): its hidden states and its unembedding go into the body, and their gradients come out of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from spmd_distill.collectives import shard_index
from spmd_distill.errors import UserError
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models.annotations import Rule, annotated_spec
from spmd_distill.models.base import Model, Shard, path_name
from spmd_distill.models.config import VOCAB_MULTIPLE
from spmd_distill.models.taps import Wanted
from spmd_distill.sharding import REPLICATED, MeshLayout, Specs
from spmd_distill.types import Batch, LogitTransform, Params, Unembedded

Run = Callable[[Params, Batch, jax.Array | None], Any]
"""Parameters, rows ``[B, L]`` and a key (None outside of training) -> what `from_apply` says."""


@dataclass(frozen=True)
class ForeignModel:
    """Anybody's function of parameters and a batch, as the step sees it. Made by `from_nnx` and `from_apply`."""

    name: str
    """What errors call it."""
    abstract: Params
    """Shape and type of every parameter."""
    axes: tuple[Any, ...]
    """The annotation of every parameter, in the order of the leaves of ``abstract`` (`annotated_spec`)."""
    run: Run
    make: Callable[[jax.Array], Params] | None
    """Random parameters from a key, where it can make them."""
    rules: Mapping[str, Rule]
    vocab_rows: int | None
    batch_axes: str

    def init(self, key: jax.Array) -> Params:
        """Random parameters; jit it with ``out_shardings`` and they are born sharded."""
        if self.make is None:
            raise UserError(
                f"{self.name} was given with its parameters and cannot make others. Place those with place_params, or "
                f"give the function that makes them in their stead."
            )
        return self.make(key)

    def specs(self, layout: MeshLayout) -> Specs:
        """Where ``layout`` puts every parameter; raise `UserError` naming one that cannot be placed."""
        leaves, tree = jax.tree_util.tree_flatten_with_path(self.abstract)
        placed = [
            annotated_spec(axes, x.shape, layout, self.rules, f"{self.name}: parameter {path_name(path)}")
            for (path, x), axes in zip(leaves, self.axes, strict=True)
        ]
        return jax.tree.unflatten(tree, placed)

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(x.size for x in jax.tree.leaves(self.abstract))

    # -- around the shard body ------------------------------------------------------------------------------------

    def forward(
        self, params: Params, batch: Batch, mapper: AbstractMapper, dropout_key: jax.Array | None = None
    ) -> Unembedded:
        """Run on global rows ``[B, L]``, inside `jax.jit`: hidden states ``[B * L, D]`` and the whole unembedding.

        Raises `UserError` where the function returns other shapes.
        """
        where, layout = mapper.shardings(REPLICATED), mapper.layout
        alone = replace(layout, axes=tuple((axis, 1) for axis in layout.axis_names))
        mesh = where.mesh if isinstance(where, NamedSharding) else alone.mesh(list(mapper.devices)[:1])
        # The mesh is there for constraints by bare PartitionSpecs; variables that nnx makes stay where they are.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nnx.use_eager_sharding(False):
            if self.batch_axes == "manual" and mesh.size > 1:
                return self._on_shards(params, batch, mesh, layout, dropout_key)
            return self._read(self.run(params, batch, dropout_key), batch)

    def handed(self, outputs: Unembedded, layout: MeshLayout) -> Any:
        """Where a shard body gets what `forward` returned: rows over the batch axes, the vocabulary over its own."""
        hidden = layout.spec(("batch", "vocab" if outputs.has_logits else None))
        bias = None if outputs.bias is None else layout.spec(("vocab",))
        table = layout.spec(("vocab", None), outputs.unembed.shape, f"{self.name}: unembedding")
        return replace(outputs, hidden=hidden, unembed=table, bias=bias)

    def apply(self, outputs: Unembedded, batch: Batch, shard: Shard, row_keys: jax.Array | None = None) -> Unembedded:
        """In a shard body: what `forward` returned, cut by `handed`, is there in place of parameters."""
        if not isinstance(outputs, Unembedded):
            raise UserError(
                f"{self.name} is no model of ours, and XLA has to cut it: it can be a teacher or a student of "
                f"Distillation, and cannot run inside a shard body."
            )
        return outputs

    def apply_tapped(
        self, outputs: Unembedded, batch: Batch, shard: Shard, taps: Wanted, row_keys: jax.Array | None = None
    ) -> tuple[Unembedded, dict[str, Any]]:
        """As `apply`: nobody can look inside."""
        assert not taps
        return self.apply(outputs, batch, shard, row_keys), {}

    def _on_shards(
        self, params: Params, batch: Batch, mesh: Any, layout: MeshLayout, key: jax.Array | None
    ) -> Unembedded:
        """Each shard of the batch axes runs its own rows, with parameters that are whole along these axes."""
        left = replace(layout, axes=tuple((a, 1 if a in layout.batch_axes else n) for a, n in layout.axes))
        params = jax.lax.with_sharding_constraint(params, self.specs(left))

        def body(params: Params, batch: Batch, key: jax.Array | None) -> Unembedded:
            if key is not None:
                key = jax.random.fold_in(key, shard_index(layout.batch_axes))
            try:
                return self._read(self.run(params, batch, key), batch)
            except ValueError as error:
                if "with_sharding_constraint" not in str(error):
                    raise
                raise UserError(
                    f"{self.name}: with batch_axes='manual', a constraint inside can name the axis model alone; take "
                    f"{', '.join(layout.batch_axes)} out of it, or leave them to XLA ('auto'). JAX says: {error}"
                ) from error

        rows = layout.spec(("batch", None))
        outputs = jax.eval_shape(lambda *given: self._read(self.run(*given), batch), params, batch, key)
        out_specs = replace(outputs, hidden=rows, unembed=REPLICATED, bias=None if outputs.bias is None else REPLICATED)
        # Without varying types, because the function need not know of them: each shard has the gradient of its own
        # rows, and the transpose of this map adds them up.
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            axis_names=set(layout.batch_axes),
            in_specs=(REPLICATED, rows, REPLICATED),
            out_specs=out_specs,
            check_vma=False,
        )
        return mapped(params, batch, key)

    def _read(self, returned: Any, batch: Batch) -> Unembedded:
        """What the function returned: checked, flat, and with as many rows of the vocabulary as shards can divide."""
        if isinstance(returned, Unembedded):
            found = returned
        elif isinstance(returned, tuple) and len(returned) == 2:
            vocab = self._shape(returned[1], "unembedding")[0]
            found = Unembedded(*returned, LogitTransform(vocab))
        else:
            logits: Any = returned
            vocab = self._shape(logits, "logits")[-1]
            found = Unembedded(logits, jnp.zeros((vocab, 0), logits.dtype), LogitTransform(vocab))
        (count, length), what = batch.tokens.shape, "logits" if found.has_logits else "hidden states"
        *rows, width = self._shape(found.hidden, what)
        if rows != [count, length]:
            last = "V" if found.has_logits else "D"
            raise UserError(
                f"{self.name} returned {what} of shape {found.hidden.shape}; expected [B, L, {last}], with B = {count} "
                f"and L = {length}."
            )
        (vocab, *depth), tokens = self._shape(found.unembed, "unembedding"), found.transform.vocab_size
        if depth != [width] and not found.has_logits:
            turned = " It is [D, V]: return its transpose." if vocab == width else ""
            raise UserError(
                f"{self.name} returned an unembedding of shape {found.unembed.shape}, but hidden states of width "
                f"{width}; expected [V, {width}].{turned}"
            )
        if found.bias is not None and found.bias.shape != (vocab,):
            raise UserError(f"{self.name} returned a bias of shape {found.bias.shape}; expected ({vocab},), one a row.")
        stored = self.vocab_rows or -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if not 0 < tokens <= min(vocab, stored):
            raise UserError(
                f"{self.name} has a vocabulary of {tokens} tokens, but {vocab} rows of the unembedding and vocab_rows "
                f"{self.vocab_rows}; expected at least as many rows as tokens."
            )

        def resized(x: jax.Array, dim: int) -> jax.Array:
            x = jax.lax.slice_in_dim(x, 0, min(stored, vocab), axis=dim)
            return jnp.pad(x, [(0, stored - x.shape[dim]) if i == dim else (0, 0) for i in range(x.ndim)])

        hidden = found.hidden.reshape(count * length, width)
        return replace(
            found,
            hidden=resized(hidden, 1) if found.has_logits else hidden,
            unembed=resized(found.unembed, 0),
            bias=None if found.bias is None else resized(found.bias, 0),
        )

    def _shape(self, x: Any, what: str) -> tuple[int, ...]:
        if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim < 2:
            found = f"{x.dtype} {list(x.shape)}" if isinstance(x, jax.Array) else type(x).__name__
            raise UserError(
                f"{self.name} returned {found} as its {what}; expected hidden states [B, L, D] and an unembedding "
                f"[V, D] (a pair, or an Unembedded), or logits [B, L, V]."
            )
        return x.shape


AnyModel: TypeAlias = Model | ForeignModel
"""What can be a student or a teacher."""


def from_apply(
    apply: Callable[..., Any],
    params: Any,
    axes: Any = None,
    *,
    rules: Mapping[str, Rule] | None = None,
    vocab_rows: int | None = None,
    batch_axes: str = "auto",
    takes_key: bool = False,
    name: str | None = None,
) -> ForeignModel:
    """Bring a function ``apply(params, batch)`` and a pytree of parameters.

    It gets global rows (`Batch` of ``[B, L]``) and returns one of

    - ``hidden [B, L, D], unembed [V, D]``, where every row of the unembedding is a token;
    - an `Unembedded` of these, with a bias, a softcap, a scale of logits or rows that are no tokens;
    - ``logits [B, L, V]``, if it cannot do otherwise: they are then held whole.

    Args:
        apply: the function.
        params: the parameters, or their shapes and types, or a function that makes them from a key.
        axes: a tree like ``params`` that names the dimensions of each: a tuple of names or a `PartitionSpec`, see
            `annotated_spec`; None for what is whole on every device. None: everything is.
        rules: where axes of other names lie: ``{"ffn": "mlp", "kv": None, "table": ("model", "data")}``.
        vocab_rows: rows of the vocabulary that the head is given; by default the next multiple of 128.
        batch_axes: "auto" leaves all axes to XLA. "manual" maps ``apply`` over the batch axes first: it gets the rows
            of one shard, with parameters gathered over them, and XLA has the axis ``model`` to cut.
        takes_key: whether ``apply`` takes a key as a third argument: for dropout in training, and None at other times.
        name: what errors call it.

    Raises `UserError`, here and where it is compiled, for what does not fit, by name.
    """
    name = name or str(getattr(apply, "__name__", type(apply).__name__))
    make = params if callable(params) else None
    abstract = jax.eval_shape(make, jax.random.key(0)) if make else params
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract)
    tree = jax.tree.structure(abstract)
    try:
        listed = tree.flatten_up_to(axes) if axes is not None else [None] * tree.num_leaves
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{name}: axes must be a tree like params, with the axes of each in its place: {error}"
        ) from error
    if batch_axes not in ("auto", "manual"):
        raise UserError(f"{name}: batch_axes is {batch_axes!r}; expected 'auto' or 'manual'.")

    def run(params: Params, batch: Batch, key: jax.Array | None) -> Any:
        return apply(params, batch, key) if takes_key else apply(params, batch)

    return ForeignModel(name, abstract, tuple(listed), run, make, dict(rules or {}), vocab_rows, batch_axes)


def from_nnx(
    module: Any,
    forward: Callable[..., Any],
    *,
    rules: Mapping[str, Rule] | None = None,
    vocab_rows: int | None = None,
    batch_axes: str = "auto",
    takes_key: bool = False,
    name: str | None = None,
) -> ForeignModel:
    """Bring a flax nnx module and ``forward(module, batch)``, which returns what `from_apply` says.

    Its `nnx.Param`s are the parameters, placed by their own annotations (``nnx.with_partitioning``, ``out_sharding=``)
    and ``sharding_rules``, then by ``rules``; the rest of its state enters the program as it is, and what ``forward``
    changes in it is forgotten. The other arguments are those of `from_apply`.

    ``module`` is a built module, or a function that makes one from `nnx.Rngs`, which is only ever traced.
    """
    built = isinstance(module, nnx.Module)

    def make() -> Any:
        with nnx.use_eager_sharding(False):
            return module(nnx.Rngs(0))

    shaped = module if built else nnx.eval_shape(make)
    structure, params, rest = nnx.split(shaped, nnx.Param, ...)
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    axes = [v.get_metadata("out_sharding", None) for v in variables]
    own: dict[str, Rule] = {}
    for v in variables:
        own |= dict(v.get_metadata("sharding_rules", None) or ())
    state = nnx.to_pure_dict(rest)
    if not built and jax.tree.leaves(state):
        state = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make(), nnx.Not(nnx.Param))))()

    def init(key: jax.Array) -> Params:
        with nnx.use_eager_sharding(False):
            return nnx.to_pure_dict(nnx.state(module(nnx.Rngs(key)), nnx.Param))

    def run(params: Params, batch: Batch, key: jax.Array | None) -> Any:
        whole = nnx.merge(structure, params, state)
        return forward(whole, batch, key) if takes_key else forward(whole, batch)

    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.to_pure_dict(params))
    model = from_apply(
        run, abstract, None, rules=own | dict(rules or {}), vocab_rows=vocab_rows, batch_axes=batch_axes,
        takes_key=True, name=name or type(shaped).__name__,
    )  # fmt: skip
    return replace(model, axes=tuple(axes), make=None if built else init)
