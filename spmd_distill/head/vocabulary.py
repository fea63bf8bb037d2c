"""What the shards of a vocabulary must know of each other: statistics of both models' logits, one collective a chunk.

Reductions over the vocabulary are made in as few passes over the logits as the data allow, each pass with all its sums
at once (`sums_over`): the exponentials of a pass are computed where they are used and never written to memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spmd_distill.collectives import axis_size, gather_stacked, shard_index
from spmd_distill.head.base import IMPOSSIBLE, LOWEST, accumulator, logits_of
from spmd_distill.types import Unembedded

LANES = 128
"""Partial sums that a row of logits is added up in on a CPU."""


@dataclass(frozen=True)
class Side:
    """One model's logits of C tokens on one shard of the vocabulary, and what all shards know of them."""

    colds: list[jax.Array]
    """Inverse temperatures, 1 / T, to look at the logits through: the views."""
    z: Float[Array, "C V"]
    slope: Any
    """d z / d (hidden @ unembed.T + bias), broadcastable to ``z``."""
    first: Int[Array, ""]
    """Global number of this shard's first row of the vocabulary."""
    vocab_size: int
    top: Float[Array, " C"]
    """The highest logit of the whole vocabulary."""
    at_label: Float[Array, " C"]
    log_sum: list[Float[Array, " C"]]
    """``logsumexp((z - top) / T)`` for every view: relative to the top, because float32 has few digits below it."""
    tokens: Any = None
    """Global numbers of selected tokens, [C, k] (see `statistics`)."""
    inside: Any = None
    """Their logits, [C, k]."""
    outside: Any = None
    """``logsumexp((z - top) / T)`` of all other tokens, for every view."""

    def scaled(self, view: int) -> Float[Array, "C V"]:
        """``(z - top) / T``."""
        return (self.z - self.top[:, None]) * self.colds[view]

    def lse(self, view: int) -> Float[Array, " C"]:
        """``logsumexp(z / T)``."""
        return self.top * self.colds[view] + self.log_sum[view]

    def surprise(self, view: int) -> Float[Array, " C"]:
        """Minus the log-probability of the label."""
        return (self.top - self.at_label) * self.colds[view] + self.log_sum[view]

    def logp(self, view: int) -> Float[Array, "C V"]:
        """Log-probabilities, not below `LOWEST`."""
        return jnp.maximum(self.scaled(view) - self.log_sum[view][:, None], LOWEST)

    def prob(self, view: int) -> Float[Array, "C V"]:
        """Probabilities."""
        return jnp.exp(self.logp(view))


def sums_over(entries: Sequence[Float[Array, "C _"]], *, one_operation: bool = True) -> list[Float[Array, " C"]]:
    """Sum each array over the vocabulary, all of one width in one pass.

    On an accelerator the sums may be left to the compiler as ``one_operation`` or many: as many, it can make something
    elementwise of the same operands (dz) in the same pass.
    """
    if not entries:
        return []
    shapes = [x.shape for x in entries]
    if len(set(shapes)) > 1:  # models of different vocabularies: a pass for each
        sums: dict[int, Float[Array, " C"]] = {}
        for shape in dict.fromkeys(shapes):
            numbers = [i for i, other in enumerate(shapes) if other == shape]
            found = sums_over([entries[i] for i in numbers], one_operation=one_operation)
            sums |= dict(zip(numbers, found, strict=True))
        return [sums[i] for i in range(len(entries))]

    def together(*entries: jax.Array) -> tuple[jax.Array, ...]:
        zeros = tuple(jnp.zeros((), x.dtype) for x in entries)
        return lax.reduce(entries, zeros, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), (1,))

    def apart(*entries: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.sum(x, axis=1) for x in entries)

    def in_lanes(*entries: jax.Array) -> tuple[jax.Array, ...]:
        # A CPU adds one after the other, which costs float32 digits over a long vocabulary: add in LANES partial sums.
        rows, width = entries[0].shape
        lanes = math.gcd(width, LANES)
        return apart(*together(*(x.reshape(rows, width // lanes, lanes) for x in entries)))

    return list(lax.platform_dependent(*entries, cpu=in_lanes, default=together if one_operation else apart))


def statistics(
    models: Sequence[Unembedded],
    labels: Int[Array, " C"],
    colds: list[jax.Array],
    axes: tuple[str, ...],
    *,
    teacher_views: Sequence[int],
    top_k: int = 0,
    logits_dtype: str | None = None,
) -> list[Side]:
    """Logits of student and teacher (``hidden [C, D]``) and their statistics, in ONE all-gather of a few rows.

    The student is looked at through all views, the teacher through ``teacher_views``.
    With ``top_k``, the teacher's likeliest tokens are selected first, which takes another. ``logits_dtype`` is what the
    logits are held in, if not in the type of the accumulator.
    """
    shard = shard_index(axes)
    firsts = [shard * m.unembed.shape[0] for m in models]
    whole = [m.unembed.shape[0] * axis_size(axes) for m in models]
    logits = [
        logits_of(m, m.hidden, first, rows, logits_dtype) for m, first, rows in zip(models, firsts, whole, strict=True)
    ]
    tokens = likeliest(top_k, axes, logits[1][0], firsts[1]) if top_k else None
    local = _local([z for z, _ in logits], firsts, labels, colds, [range(len(colds)), teacher_views], tokens)
    leaves, tree = jax.tree.flatten(local)
    stacked = gather_stacked(jnp.concatenate(leaves), axes)  # [shards, rows, C]
    edges = [sum(leaf.shape[0] for leaf in leaves[:i]) for i in range(1, len(leaves))]
    stats = jax.tree.unflatten(tree, jnp.split(stacked, edges, axis=1))
    return [
        _combined(stat, *z, first, m.transform.vocab_size, colds, tokens)
        for stat, z, first, m in zip(stats, logits, firsts, models, strict=True)
    ]


def _local(
    logits: list[jax.Array],
    firsts: list[jax.Array],
    labels: jax.Array,
    colds: list[jax.Array],
    seen: list[Sequence[int]],
    tokens: jax.Array | None,
) -> list[dict[str, jax.Array]]:
    """Rows ``[.., C]`` of what this shard knows of each model; all exponentials in one pass over both."""
    tops = [jnp.max(z, axis=1).astype(colds[0].dtype) for z in logits]

    def at(z: jax.Array, columns: jax.Array) -> jax.Array:
        here = columns < z.shape[1]
        found = jnp.take_along_axis(z, jnp.minimum(columns, z.shape[1] - 1), axis=1)
        return jnp.where(here, found, 0).T.astype(colds[0].dtype)

    def exponentials(logits: list[jax.Array], tops: list[jax.Array]) -> list[jax.Array]:
        entries = [
            [jnp.exp((z - top[:, None]) * colds[view]) for view in views]
            for z, top, views in zip(logits, tops, seen, strict=True)
        ]
        if all(z.shape == logits[0].shape for z in logits):
            found = iter(sums_over([x for of_model in entries for x in of_model]))
        else:
            found = iter([x for of_model in entries for x in sums_over(of_model)])
        sums = [{view: next(found) for view in views} for views in seen]
        nobody = jnp.ones_like(tops[0])  # looks at this model through that temperature
        return [jnp.stack([known.get(view, nobody) for view in range(len(colds))]) for known in sums]

    columns = [local_columns(labels[:, None], first, z.shape[1]) for z, first in zip(logits, firsts, strict=True)]
    found = [
        {"top": top[None], "label": at(z, column), "exp": exps}
        for z, top, column, exps in zip(logits, tops, columns, exponentials(logits, tops), strict=True)
    ]
    if tokens is not None:
        chosen = [local_columns(tokens, first, z.shape[1]) for z, first in zip(logits, firsts, strict=True)]
        others = [put(z, c, jnp.asarray(-jnp.inf, z.dtype)) for z, c in zip(logits, chosen, strict=True)]
        # Relative to their own maximum: relative to that of all tokens they vanish where a teacher is sure.
        tops = [jnp.maximum(jnp.max(z, axis=1).astype(tops[0].dtype), IMPOSSIBLE) for z in others]
        rest = exponentials(others, tops)
        for side, z, c, top, exps in zip(found, logits, chosen, tops, rest, strict=True):
            side |= {"inside": at(z, c), "outside top": top[None], "outside": exps}
    return found


def _combined(
    stat: dict[str, jax.Array],
    z: jax.Array,
    slope: jax.Array,
    first: jax.Array,
    vocab_size: int,
    colds: list[jax.Array],
    tokens: jax.Array | None,
) -> Side:
    """The whole vocabulary's statistics from those of all shards, ``[shards, rows, C]`` each."""

    def log_sums(tops: jax.Array, sums: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        top = jnp.max(tops, axis=0)  # its own exponential is 1: the logarithm is of 1 or more
        total = [jnp.sum(sums[:, k] * jnp.exp((tops - top) * cold), axis=0) for k, cold in enumerate(colds)]
        return top, [jnp.log(x) for x in total]

    top, log_sum = log_sums(stat["top"][:, 0], stat["exp"])
    side = Side(colds, z, slope, first, vocab_size, top, jnp.sum(stat["label"][:, 0], axis=0), log_sum)
    if tokens is None:
        return side
    next_top, rest = log_sums(stat["outside top"][:, 0], stat["outside"])
    outside = [(next_top - top) * cold + x for cold, x in zip(colds, rest, strict=True)]
    return replace(side, tokens=tokens, inside=jnp.sum(stat["inside"], axis=0).T, outside=outside)


def likeliest(k: int, axes: tuple[str, ...], z: Float[Array, "C V"], first: jax.Array) -> Int[Array, "C k"]:
    """Global numbers of each token's k highest logits, over all shards of the vocabulary."""
    k = min(k, z.shape[1] * axis_size(axes))
    values, columns = lax.top_k(z, min(k, z.shape[1]))
    values = values.astype(accumulator(z))
    numbers = (columns + first).astype(values.dtype)  # exact: no vocabulary has 2^24 tokens
    stacked = gather_stacked(jnp.stack([values.T, numbers.T]), axes)  # [shards, 2, k, C]
    values, numbers = (stacked[:, i].reshape(-1, z.shape[0]).T for i in range(2))
    _, best = lax.top_k(values, k)
    return jnp.take_along_axis(numbers, best, axis=1).astype(jnp.int32)


def local_columns(tokens: Int[Array, "C k"], first: jax.Array, width: int) -> Int[Array, "C k"]:
    """This shard's columns of tokens given by their global numbers; ``width`` for those of other shards."""
    return jnp.where((tokens >= first) & (tokens < first + width), tokens - first, width)


def put(z: Float[Array, "C V"], columns: Int[Array, "C k"], values: jax.Array) -> Float[Array, "C V"]:
    """Write ``values [C, k]`` (or one value) at ``columns`` of every row; columns past the end are dropped."""
    return z.at[jnp.arange(z.shape[0])[:, None], columns].set(values, mode="drop")
