"""How many bytes the collectives of a step put on the wire, counted in the traced program, for any layout.

Per device, in the ring algorithms: an all-gather or a reduce-scatter over n shards moves ``(n - 1) / n`` of the whole
array, an all-reduce twice that. The body of a scan counts as often as it runs, and the head takes all tokens in one
chunk, so that masked ones count too. What XLA moves by itself outside of the mapped body is not in it: the update of an
optimizer whose state is cut otherwise than the parameters.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from spmd_distill.errors import UserError
from spmd_distill.head import FusedHead
from spmd_distill.mappers import make_mapper
from spmd_distill.program.flops import inside
from spmd_distill.sharding import REPLICATED, MeshLayout, layout_names
from spmd_distill.step import Distillation
from spmd_distill.types import Batch

_REDUCE = ("psum", "psum_invariant", "pmax", "pmin")
_GATHER = ("all_gather", "all_gather_invariant")
_SCATTER = ("reduce_scatter",)
_ALL = 2**30
"""Tokens, more than a step has."""


def wire_bytes(run: Distillation, batch: Batch) -> float:
    """Bytes a device that one training step on a batch like ``batch [A, B, L]`` puts on the wire.

    Raises `UserError` for a model that is cut by XLA, whose collectives are in no traced program.
    """
    if run.foreign:
        raise UserError("The collectives of models of other code bases are XLA's own and cannot be counted here.")
    head = replace(run.head, chunk=_ALL) if isinstance(run.head, FusedHead) else run.head
    run = replace(run, head=head)
    layout, trained, teacher = run.mapper.layout, run.trained, run.teacher.model
    specs = trained.specs(layout), teacher.specs(layout), run.batch_specs(1), REPLICATED, REPLICATED
    body = run.mapper.map(run.train_body, specs, (specs[0], REPLICATED, REPLICATED))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    number = (jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.uint32))
    return _of(jax.make_jaxpr(body)(trained.abstract, teacher.abstract, shapes, *number).jaxpr, layout.sizes)


def quieter_layout(run: Distillation, batch: Batch) -> tuple[str, float, float] | None:
    """The built-in layout for as many devices that moves least: its name, its bytes, and those of the run's own.

    None where none moves less, or nothing can be counted. Memory is not looked at: a run on the other layout is
    refused where it does not fit.
    """
    found = dict[str, float]()
    try:
        own = wire_bytes(replace(run, mapper=make_mapper("shard_map", run.mapper.layout)), batch)
    except UserError:
        return None
    for name in layout_names(len(run.mapper.devices)):
        try:
            if (layout := MeshLayout.load(name)).device_count == len(run.mapper.devices):
                found[name] = wire_bytes(replace(run, mapper=make_mapper("shard_map", layout)), batch)
        except UserError:
            continue  # its axes do not divide this model or batch
    best = min(found, key=lambda name: found[name], default=None)
    return None if best is None or found[best] >= own else (best, found[best], own)


def _of(jaxpr: Any, sizes: Mapping[str, int]) -> float:
    return sum((_of_equation(equation, sizes) for equation in jaxpr.eqns), 0.0)


def _of_equation(equation: Any, sizes: Mapping[str, int]) -> float:
    name, params = equation.primitive.name, equation.params
    if name in (*_REDUCE, *_GATHER, *_SCATTER):
        axes = params.get("axes") or params["axis_name"]
        shards = math.prod(sizes.get(axis, 1) for axis in ((axes,) if isinstance(axes, str) else axes))
        small, large = (
            sum(x.aval.size * x.aval.dtype.itemsize for x in xs) for xs in (equation.invars, equation.outvars)
        )
        if name in _SCATTER:
            small, large = large, small
        return (2 if name in _REDUCE else 1) * (shards - 1) / shards * large
    inner = [_of(jaxpr, sizes) for jaxpr in inside(params)]
    if name == "cond":
        return max(inner, default=0.0)
    return (params["length"] if name == "scan" else 1) * sum(inner)
