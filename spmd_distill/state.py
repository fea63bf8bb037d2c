"""The train state: born sharded, described without being made, and a student cut out of its teacher."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spmd_distill.distributed import place
from spmd_distill.errors import UserError
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import Model
from spmd_distill.models.base import path_name
from spmd_distill.models.foreign import AnyModel
from spmd_distill.optimizer import SKIP, Skip, UpdateRule, as_rule
from spmd_distill.program import Compiled, abstract_like, compile_program
from spmd_distill.sharding import REPLICATED
from spmd_distill.step import Distillation
from spmd_distill.types import Batch, Params, TrainState


def init_params(model: AnyModel, mapper: AbstractMapper, seed: int) -> Params:
    """Random parameters, each made on the devices that hold it; the same numbers on every layout."""
    shardings = mapper.shardings(model.specs(mapper.layout))
    return jax.jit(model.init, out_shardings=shardings)(jax.random.key(seed))


def place_params(params: Any, model: AnyModel, mapper: AbstractMapper) -> Params:
    """Copy parameters to the devices that hold them: a tree like the model's, or an nnx module with its names.

    Raises `UserError` naming the first array that is missing, too many, or of another shape or type than the model's.
    """
    if isinstance(params, nnx.Module):
        params = nnx.to_pure_dict(nnx.state(params, nnx.Param))

    def by_name(tree: Any) -> dict[str, Any]:
        return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}

    def described(x: Any) -> str:
        return "none" if x is None else f"{jnp.dtype(x.dtype).name} {list(x.shape)}"

    found, expected = by_name(params), by_name(model.abstract)
    for name in [*expected, *found]:
        if (there := described(found.get(name))) != (wanted := described(expected.get(name))):
            raise UserError(f"Parameter {name}: found {there}, but the model that it is for expects {wanted}.")
    ordered = jax.tree.unflatten(jax.tree.structure(model.abstract), [found[name] for name in expected])
    shardings: Any = mapper.shardings(model.specs(mapper.layout))
    if jax.process_count() > 1:
        return place(ordered, shardings)
    return jax.tree.map(lambda x, where: jax.device_put(x, where, may_alias=False), ordered, shardings)


def create_state(
    run: Distillation, tx: optax.GradientTransformation | UpdateRule, params: Params, seed: int
) -> TrainState:
    """A state at step 0 around ``params`` (which it takes over), with the optimizer's moments sharded like them.

    Parameters of losses inside the network are made here, where ``params`` are the student's alone.
    """
    params = run.trained.complete(params, run.mapper, seed)
    make = functools.partial(as_rule(tx).start, seed=seed)
    return jax.jit(make, out_shardings=run.state_shardings(tx), donate_argnums=0)(params)


def abstract_state(run: Distillation, tx: optax.GradientTransformation | UpdateRule) -> TrainState:
    """Shapes, types and shardings of a state, without an array: what a checkpoint is restored into."""
    shapes, shardings = run.abstract_state(tx), run.state_shardings(tx)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def compile_train_step(
    run: Distillation, tx: optax.GradientTransformation | UpdateRule, batch: Batch, skip: Skip = SKIP
) -> Compiled:
    """The training step for batches like ``batch [A, B, L]``, compiled while no array is on a device yet.

    What it needs of a device's memory is known before anything is placed there, and every step runs this very program.
    """
    shardings, teacher = run.mapper.shardings, run.teacher.model
    limit = jax.ShapeDtypeStruct((), jnp.float32, sharding=shardings(REPLICATED))
    return compile_program(
        run.train_step(tx, skip=skip),
        abstract_state(run, tx),
        abstract_like(teacher.abstract, shardings(teacher.specs(run.mapper.layout))),
        abstract_like(batch, shardings(run.batch_specs(batch.tokens.ndim - 2))),
        *([limit] if skip.spike else []),
    )


def select_layers(params: Params, model: Model, layers: Sequence[int], mapper: AbstractMapper) -> Params:
    """Parameters of a student made of some of a model's own layers, copied on the devices in the student's own type.

    ``params`` belong to a deeper model of the same width as ``model``; ``layers`` are its layer numbers, from 0.
    """
    depth = jax.tree.leaves(params["layers"])[0].shape[0]
    if bad := [i for i in layers if not 0 <= i < depth]:
        raise UserError(f"Student layers: the teacher has layers 0 to {depth - 1}, so {bad[0]} cannot be taken.")
    if len(layers) != model.config.layers:
        raise UserError(f"Student layers: {len(layers)} given for a student of {model.config.layers} layers.")
    index = jnp.asarray(list(layers))

    def take(params: Params) -> Params:
        taken = {**params, "layers": jax.tree.map(lambda x: x[index], params["layers"])}
        return jax.tree.map(lambda x, kind: jnp.array(x, kind.dtype), taken, model.abstract)

    shardings: Any = mapper.shardings(model.specs(mapper.layout))
    return jax.jit(take, out_shardings=shardings)(params)
