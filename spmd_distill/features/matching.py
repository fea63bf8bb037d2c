"""Which layers of two models look alike: linear CKA on a few rows, and the pairs of layers that it makes.

CKA compares the Gram matrices of two sets of features of the same tokens (Kornblith et al. 2019, arXiv:1905.00414, with
linear kernels), so that the models' widths and the order of their channels do not matter. `best_pairs` picks a
teacher's layer for each layer of the student such that the sum of the CKA is largest and no two pairs cross.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_distill.collectives import all_gather, axis_size, gather_stacked, same_on
from spmd_distill.distributed import fetch, place
from spmd_distill.features.cka import alignment, gram
from spmd_distill.features.heads import heads_of
from spmd_distill.features.layer_maps import Pairs, Uniform
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import Model, Shard
from spmd_distill.models.taps import Tap, Wanted
from spmd_distill.sharding import REPLICATED
from spmd_distill.types import Batch, Params

TOKENS = 1024
"""So many tokens are compared at most: the Gram matrix of a layer has this number squared."""

OF_HEADS = ("attention_heads", "queries", "keys", "values")
"""Tap points where shards of ``model`` hold different heads."""


def layer_similarity(
    student: Model,
    params: Params,
    teacher: Model,
    teacher_params: Params,
    mapper: AbstractMapper,
    batch: Batch,
    taps: Sequence[str],
    dtype: Any = "float32",
    most: int = TOKENS,
) -> dict[str, np.ndarray]:
    """For each tap point, the CKA of every layer of the student with every one of the teacher, ``[layers, layers]``.

    ``batch [B, L]``, on the host, has rows for the mapper's batch shards; of its valid tokens, ``most`` at most are
    compared, the same number of each row, spread over it. ``dtype`` is the models' compute type. What a layer holds is
    the same as in training but for rounding: sequences are not cut here.
    """
    layout = mapper.layout.with_whole_rows()
    shard, axes = Shard(layout, jnp.dtype(dtype)), (*layout.batch_axes, "model")
    places, order = _chosen(np.asarray(batch.mask), most)

    def grams(model: Model, places: jax.Array) -> Wanted:
        def of(tap: str, x: jax.Array) -> jax.Array:  # [B, L, ...] -> [tokens, tokens]
            x = jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), 1)
            if tap in OF_HEADS:
                x = heads_of(tap, model.config).gathered(x)
            elif tap == "mlp_neurons":
                x = all_gather(x, "model", dim=2)
            rows = gather_stacked(x, layout.batch_axes).reshape(places.size * axis_size(layout.batch_axes), -1)
            return same_on(gram(rows[order]), axes)

        return {tap: Tap(lambda x, tap=tap: of(tap, x)) for tap in taps}

    def body(params: Params, teacher_params: Params, batch: Batch, places: jax.Array) -> tuple[Any, Any]:
        _, ours = student.apply_tapped(params, batch, shard, grams(student, places))
        _, theirs = teacher.apply_tapped(teacher_params, batch, shard, grams(teacher, places))
        return ours, theirs

    rows = layout.spec(("batch", None))
    specs = (student.specs(layout), teacher.specs(layout), Batch(*(rows,) * 5), rows)
    mapped = mapper.map(body, specs, (REPLICATED, REPLICATED))
    compare = jax.jit(lambda *args: {tap: _cka(*(side[tap] for side in mapped(*args))) for tap in taps})
    placed = place((batch, places), (mapper.shardings(specs[2]), mapper.shardings(rows)))
    return {tap: np.asarray(x) for tap, x in fetch(compare(params, teacher_params, *placed)).items()}


def best_pairs(similarity: np.ndarray, count: int | None = None) -> Pairs:
    """Layers of the student, ``count`` of them at equal distances, each with a layer of the teacher.

    ``similarity [student's layers, teacher's layers]``. Among all choices where the teacher's layers ascend with the
    student's (and where the teacher has fewer, do not descend), that with the largest sum; of equal ones, that with the
    earliest layers.

    Raises `UserError` for a ``count`` that the student does not have.
    """
    students = [s for s, _ in Uniform(count).pairs(*similarity.shape)]
    scores = np.asarray(similarity, np.float64)[students]
    apart = int(len(students) <= scores.shape[1])
    best, before = scores[0], []
    for row in scores[1:]:
        # for each layer of the teacher: the one that the pairs before it had better end with
        last = [-1 if t < apart else int(np.argmax(best[: t + 1 - apart])) for t in range(len(row))]
        before.append(last)
        best = np.array([-np.inf if u < 0 else best[u] + x for u, x in zip(last, row, strict=True)])
    layers = [int(np.argmax(best))]
    for last in reversed(before):
        layers.append(last[layers[-1]])
    return tuple(zip(students, reversed(layers), strict=True))


def _chosen(valid: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns ``[B, k]`` of the tokens that are compared, and which of all these places hold one, ascending."""
    each = max(1, most // len(valid))
    counts = np.minimum(valid.sum(1), each)
    places = np.zeros((len(valid), max(1, int(counts.max()))), np.int32)
    for row, count in enumerate(counts):
        columns = np.flatnonzero(valid[row])
        places[row, :count] = columns[np.linspace(0, len(columns) - 1, count).astype(int)]
    return places, np.flatnonzero(np.arange(places.shape[1]) < counts[:, None])


def _cka(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    """``[student's layers, tokens, tokens]`` and the teacher's: CKA of each with each."""
    dot = lambda how, *x: jnp.einsum(how, *x, precision=jax.lax.Precision.HIGHEST)  # noqa: E731
    square = lambda x: dot("kij,kij->k", x, x)  # noqa: E731
    xy, xx, yy = dot("sij,tij->st", ours, theirs), square(ours), square(theirs)
    return alignment(xy, *jnp.broadcast_arrays(xx[:, None], yy[None, :]))
