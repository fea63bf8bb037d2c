"""How much each part of a model matters on a calibration text.

Neurons, heads and channels are ranked by their activations, as in Minitron (Muralidharan et al. 2024, arXiv:2407.14679,
section 2.2): the mean over the tokens of a row, and the L2 norm over rows. Layers are ranked by what their removal
costs (section 2.3 there; ShortGPT, Men et al. 2024, arXiv:2403.03853, ranks by another measure).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_distill.collectives import axis_index, psum, same_on
from spmd_distill.distributed import fetch, place
from spmd_distill.divergences import ForwardKL
from spmd_distill.head import FusedHead
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models.base import Model, Shard, Tap
from spmd_distill.models.heads import head_plan
from spmd_distill.objective import Objective
from spmd_distill.sharding import REPLICATED, MeshLayout
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch, Params

Progress = Callable[[Sequence[int]], Any]
"""Goes through a sequence and may show how far it is."""


@dataclass(frozen=True, eq=False)
class Importance:
    """The larger, the more a part is used; comparable within a row of an array only."""

    neurons: np.ndarray
    """``[layers, mlp]``"""
    heads: np.ndarray
    """``[layers, heads]``"""
    kv_heads: np.ndarray
    """``[layers, kv_heads]``: the sum over the query heads that share one."""
    channels: np.ndarray
    """``[width]``: the sum over the inputs of all blocks."""


def activations(
    model: Model, params: Params, mapper: AbstractMapper, batches: Sequence[Batch], dtype: Any = "float32"
) -> Importance:
    """Rank neurons, heads and channels by their activations on batches ``[B, L]`` of the mapper's batch shards."""
    config, layout = model.config, mapper.layout.with_whole_rows()
    shard = Shard(layout, jnp.dtype(dtype))

    def body(params: Params, batch: Batch) -> dict[str, jax.Array]:
        valid = (batch.segments > 0).astype(jnp.float32)
        tokens = jnp.maximum(jnp.sum(valid, axis=1), 1)

        def norm(x: jax.Array) -> jax.Array:  # [B, L, n] -> [n], summed squares over this shard's rows
            means = jnp.einsum("bln,bl->bn", jnp.abs(x).astype(jnp.float32), valid) / tokens[:, None]
            return jnp.sum(jnp.square(means), axis=0)

        def of_heads(x: jax.Array) -> jax.Array:  # local heads, which `head_plan` numbers -> all heads
            table = np.asarray(head_plan(config.heads, config.kv_heads, shard.tensor_parallel).queries)
            found = norm(jnp.linalg.norm(x.astype(jnp.float32), axis=-1))
            every = jnp.zeros(config.heads + 1).at[jnp.asarray(table)[axis_index("model")]].add(found)
            return psum(every[:-1], "model")

        taps = {"mlp_neurons": norm, "attention_heads": of_heads, "attention_input": norm, "mlp_input": norm}
        _, seen = model.apply_tapped(params, batch, shard, {name: Tap(make) for name, make in taps.items()})
        seen |= {name: same_on(seen[name], "model") for name in ("attention_input", "mlp_input")}
        return psum(seen, layout.batch_axes)

    rows, neurons = layout.spec(("batch", None)), layout.spec((None, "mlp"))
    out = {"mlp_neurons": neurons} | dict.fromkeys(("attention_heads", "attention_input", "mlp_input"), REPLICATED)
    run = jax.jit(mapper.map(body, (model.specs(layout), Batch(*(rows,) * 5)), out))
    total: dict[str, np.ndarray] = {}
    for batch in _placed(batches, mapper, layout):
        for name, value in fetch(jax.block_until_ready(run(params, batch))).items():
            total[name] = total.get(name, 0) + np.asarray(value, np.float64)
    found = {name: np.sqrt(value) for name, value in total.items()}
    heads = found["attention_heads"]
    groups = heads.reshape(config.layers, config.kv_heads, -1).sum(-1)
    channels = (found["attention_input"] + found["mlp_input"]).sum(0)
    return Importance(found["mlp_neurons"], heads, groups, channels)


def measure_removals(
    model: Model, params: Params, mapper: AbstractMapper, batches: Sequence[Batch], dtype: Any = "float32"
) -> Callable[..., np.ndarray]:
    """A function of ``(layers, removed, progress)``: what each of ``layers`` costs where ``removed`` are gone already.

    That is the KL of the model to itself without the layer, in nats a token; float64. It may be asked again and again.
    A layer is removed by taking what it adds to the hidden state away (its two output projections become zero), in one
    compiled program for all of them; the whole model runs once.
    """
    layout = mapper.layout
    shard, head = Shard(layout, jnp.dtype(dtype)), FusedHead()
    objective = Objective.mix(ForwardKL(), alpha=1.0)
    rows, specs = layout.spec(("batch", None)), model.specs(layout)
    batch_specs = Batch(*(rows,) * 5)

    def hidden_of(params: Params, batch: Batch) -> jax.Array:
        return model.apply(params, batch, shard).hidden

    def kl(params: Params, hidden: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        out = model.apply(params, batch, shard)
        count = psum(jnp.sum(batch.mask, dtype=jnp.int32), layout.batch_axes)
        axes: dict[str, Any] = {"batch_axes": layout.batch_axes, "vocab_axes": layout.vocab_axes}
        whole = replace(out, hidden=hidden)  # the unembedding is the same
        _, sums = objective(head, out, whole, batch, jnp.int32(0), count, agreement=True, **axes)
        return psum(sums["kl"], layout.batch_axes), count

    def without(params: Params, gone: jax.Array) -> Params:
        def zero(x: jax.Array) -> jax.Array:
            return jnp.where(gone.reshape(-1, *(1,) * (x.ndim - 1)), 0, x)

        layers = dict(params["layers"])
        layers["attention"] = layers["attention"] | {"o": zero(layers["attention"]["o"])}
        layers["mlp"] = layers["mlp"] | {"down": zero(layers["mlp"]["down"])}
        return params | {"layers": layers}

    run_whole = jax.jit(mapper.map(hidden_of, (specs, batch_specs), rows))
    compare = mapper.map(kl, (specs, rows, batch_specs), (REPLICATED, REPLICATED))
    run = jax.jit(lambda params, gone, *rest: compare(without(params, gone), *rest))
    placed = list(_placed(batches, mapper, layout))
    kept = [jax.block_until_ready(run_whole(params, batch)) for batch in placed]

    def costs(
        layers: Sequence[int], removed: Sequence[int] = (), progress: Progress = lambda layers: layers
    ) -> np.ndarray:
        found = []
        for layer in progress(layers):
            gone = np.isin(np.arange(model.config.layers), [layer, *removed])
            total, count = 0.0, 0
            for batch, hidden in zip(placed, kept, strict=True):
                value, valid = fetch(jax.block_until_ready(run(params, gone, hidden, batch)))
                total, count = total + float(value), count + int(valid)
            found.append(total / max(count, 1))
        return np.asarray(found)

    return costs


def layers_to_keep(
    costs_without: Callable[[Sequence[int], Sequence[int]], np.ndarray], depth: int, count: int, *, one_by_one: bool
) -> tuple[int, ...]:
    """The ``count`` layers of ``depth`` whose removal hurts most.

    ``costs_without(layers, removed)`` is what `measure_removals` returns. ``one_by_one`` measures again after every
    removal, which costs as many measurements as there are layers, each time; otherwise they are measured once, each
    alone.
    """
    kept, removed = list(range(depth)), []
    if not one_by_one:
        costs = costs_without(kept, [])
        return tuple(int(i) for i in np.sort(np.argsort(-costs, kind="stable")[:count]))
    while len(kept) > count:
        removed.append(kept.pop(int(np.argmin(costs_without(kept, removed)))))
    return tuple(kept)


def agreement(
    student: Model, params: Params, teacher: Model, teacher_params: Params, mapper: AbstractMapper,
    batches: Sequence[Batch], dtype: Any = "float32",
) -> dict[str, float]:  # fmt: skip
    """Held-out metrics of a student (``kl``, ``ce_student``, ``ce_teacher``, ``top1`` and more), a token each."""
    objective = Objective.mix(ForwardKL(), alpha=1.0)
    run = Distillation(student, OnlineTeacher(teacher), objective, mapper, FusedHead(), jnp.dtype(dtype))
    found = run.evaluate(run.eval_step(), params, teacher_params, batches, jnp.int32(0))
    return {name: float(mean.value) for name, mean in found.items()}


def _placed(batches: Sequence[Batch], mapper: AbstractMapper, layout: MeshLayout) -> Any:
    shardings = mapper.shardings(Batch(*(layout.spec(("batch", None)),) * 5))
    return (place(batch, shardings) for batch in batches)
