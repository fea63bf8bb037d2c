"""The train state: born sharded, described without being made, and a student cut out of its teacher."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd_distill.errors import UserError
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import Model
from spmd_distill.step import Distillation
from spmd_distill.types import Params, TrainState


def init_params(model: Model, mapper: AbstractMapper, seed: int) -> Params:
    """Random parameters, each made on the devices that hold it; the same numbers on every layout."""
    shardings = mapper.shardings(model.specs(mapper.layout))
    return jax.jit(model.init, out_shardings=shardings)(jax.random.key(seed))


def create_state(run: Distillation, tx: optax.GradientTransformation, params: Params, seed: int) -> TrainState:
    """A state at step 0 around ``params`` (which it takes over), with the optimizer's moments sharded like them."""
    shardings = run.mapper.shardings(run.state_specs(tx))

    def make(params: Params) -> TrainState:
        return TrainState(jnp.int32(0), params, tx.init(params), jnp.uint32(seed))

    return jax.jit(make, out_shardings=shardings, donate_argnums=0)(params)


def abstract_state(run: Distillation, tx: optax.GradientTransformation) -> TrainState:
    """Shapes, types and shardings of a state, without an array: what a checkpoint is restored into."""
    shapes = jax.eval_shape(lambda p: TrainState(jnp.int32(0), p, tx.init(p), jnp.uint32(0)), run.student.abstract)
    shardings = run.mapper.shardings(run.state_specs(tx))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def select_layers(params: Params, model: Model, layers: Sequence[int], mapper: AbstractMapper) -> Params:
    """Parameters of a student that is made of some of a model's own layers, copied on the devices.

    ``params`` belong to a deeper model of the same width as ``model``; ``layers`` are its layer numbers, from 0.
    """
    depth = jax.tree.leaves(params["layers"])[0].shape[0]
    if bad := [i for i in layers if not 0 <= i < depth]:
        raise UserError(f"Student layers: the teacher has layers 0 to {depth - 1}, so {bad[0]} cannot be taken.")
    if len(layers) != model.config.layers:
        raise UserError(f"Student layers: {len(layers)} given for a student of {model.config.layers} layers.")
    index = jnp.asarray(list(layers))

    def take(params: Params) -> Params:
        return {
            **jax.tree.map(jnp.copy, params),
            "layers": jax.tree.map(lambda x: x[index], params["layers"]),
        }

    shardings: Any = mapper.shardings(model.specs(mapper.layout))
    return jax.jit(take, out_shardings=shardings)(params)
