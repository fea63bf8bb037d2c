"""A tiny model of every family with random parameters, a batch with padding, and logits: what pruning is tried on."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from families import CONFIGS

from spmd_distill.head.base import logits_of
from spmd_distill.mappers import make_mapper
from spmd_distill.models import FAMILIES, Model, Shard, decoder
from spmd_distill.sharding import MeshLayout
from spmd_distill.types import Batch

B, L = 4, 12
ONE = make_mapper("vmap", "single")


def model_of(name: str) -> tuple[Model, Any]:
    config = FAMILIES[CONFIGS[name]["architectures"][0]].config_from_huggingface(CONFIGS[name])
    model = decoder(replace(config, param_dtype="float64"))
    leaves, tree = jax.tree.flatten(model.abstract)
    r = np.random.default_rng(1)
    return model, tree.unflatten([jnp.asarray(r.normal(size=x.shape) * 0.3) for x in leaves])


def batch_of(tokens: int = 131) -> Batch:
    tokens = np.random.default_rng(0).integers(0, tokens, (B, L + 1)).astype(np.int32)
    segments = np.tile(np.repeat([1, 2], [7, 5]).astype(np.int32), (B, 1))
    segments[1, 9:] = 0
    positions = np.tile(np.r_[np.arange(7), np.arange(5)].astype(np.int32), (B, 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], segments > 0, positions, segments)


def logits(model: Model, params: Any) -> np.ndarray:
    """``[B * L, V]`` of the tokens of `batch_of`."""
    shard, tokens = Shard(MeshLayout.load("single"), jnp.dtype("float64")), model.config.tokens

    def run(params, batch):
        out = model.apply(params, batch, shard)
        return logits_of(out, out.hidden, 0)[0]

    spec = ONE.layout.spec(())
    return np.asarray(jax.jit(ONE.map(run, (spec, spec), spec))(params, batch_of(tokens)))[:, :tokens]
