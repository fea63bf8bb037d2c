"""What the shards of a vocabulary must know of each other: statistics of both models' logits, one collective a chunk.

Reductions over the vocabulary are made in as few passes over the logits as the data allow, each pass with all its sums
at once (`sums_over`): the exponentials of a pass are computed where they are used and never written to memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from spmd_distill.collectives import axis_size, gather_stacked, shard_index
from spmd_distill.head.base import LOWEST, logits_of
from spmd_distill.types import Unembedded

LANES = 128
"""Partial sums that a row of logits is reduced through: float32 keeps its digits over long vocabularies."""


@dataclass(frozen=True)
class Side:
    """One model's logits of C tokens on one shard of the vocabulary, and what all shards know of them."""

    z: Float[Array, "C V"]
    slope: Any
    """d z / d (hidden @ unembed.T + bias), broadcastable to ``z``."""
    first: Int[Array, ""]
    """Global number of this shard's first row of the vocabulary."""
    argmax: Float[Array, " C"]
    at_label: Float[Array, " C"]
    lse: list[Float[Array, " C"]]
    """Log-sum-exp of ``z / T`` for every temperature."""
    vocab_size: int
    tokens: Any = None
    """Global numbers of selected tokens, [C, k] (see `statistics`)."""
    inside: Any = None
    """Their logits, [C, k]."""
    outside: Any = None
    """Log-sum-exp of all other tokens, for every temperature."""

    def logp(self, view: int, temperatures: Sequence[jax.Array]) -> Float[Array, "C V"]:
        """Log-probabilities at a temperature, not below `LOWEST`."""
        return jnp.maximum(self.z / temperatures[view] - self.lse[view][:, None], LOWEST)


def sums_over(entries: Sequence[Float[Array, "C V"]]) -> list[Float[Array, " C"]]:
    """Sum each array over the vocabulary, all in one pass."""
    if not entries:
        return []
    rows, width = entries[0].shape
    lanes = LANES if width % LANES == 0 else 1
    folded = tuple(x.reshape(rows, width // lanes, lanes) for x in entries)
    zeros = tuple(jnp.zeros((), x.dtype) for x in entries)
    partial = lax.reduce(folded, zeros, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), (1,))
    return [jnp.sum(x, axis=1) for x in partial]


def statistics(
    models: Sequence[Unembedded],
    labels: Int[Array, " C"],
    temperatures: Sequence[jax.Array],
    axes: tuple[str, ...],
    top_k: int = 0,
) -> list[Side]:
    """Logits of student and teacher (``hidden [C, D]``) and their statistics, in ONE all-gather of a few rows.

    With ``top_k``, the teacher's likeliest tokens are selected first, which takes another.
    """
    shard = shard_index(axes)
    firsts = [shard * m.unembed.shape[0] for m in models]
    logits = [logits_of(m, m.hidden, first) for m, first in zip(models, firsts, strict=True)]
    tokens = likeliest(top_k, axes, logits[1][0], firsts[1]) if top_k else None
    local = [_local(z, first, labels, temperatures, tokens) for (z, _), first in zip(logits, firsts, strict=True)]
    leaves, tree = jax.tree.flatten(local)
    stacked = gather_stacked(jnp.concatenate(leaves), axes)  # [shards, rows, C]
    edges = [sum(leaf.shape[0] for leaf in leaves[:i]) for i in range(1, len(leaves))]
    stats = jax.tree.unflatten(tree, jnp.split(stacked, edges, axis=1))
    return [
        _combined(stat, *z, first, m.transform.vocab_size, temperatures, tokens)
        for stat, z, first, m in zip(stats, logits, firsts, models, strict=True)
    ]


def _local(
    z: jax.Array, first: jax.Array, labels: jax.Array, temperatures: Sequence[jax.Array], tokens: jax.Array | None
) -> dict[str, jax.Array]:
    """Rows ``[.., C]`` of what this shard knows."""
    top = jnp.max(z, axis=1)

    def at(columns: jax.Array) -> jax.Array:
        here = (columns >= first) & (columns < first + z.shape[1])
        found = jnp.take_along_axis(z, jnp.clip(columns - first, 0, z.shape[1] - 1), axis=1)
        return jnp.where(here, found, 0).T

    def exponentials(z: jax.Array) -> jax.Array:
        return jnp.stack(sums_over([jnp.exp((z - top[:, None]) / t) for t in temperatures]))

    found = {
        "top": top[None],
        "argmax": (jnp.argmax(z, axis=1) + first).astype(z.dtype)[None],  # exact: no vocabulary has 2^24 tokens
        "label": at(labels[:, None]),
        "exp": exponentials(z),
    }
    if tokens is not None:
        others = put(z, local_columns(tokens, first, z.shape[1]), jnp.asarray(-jnp.inf, z.dtype))
        found |= {"inside": at(tokens), "outside": exponentials(others)}
    return found


def _combined(
    stat: dict[str, jax.Array],
    z: jax.Array,
    slope: jax.Array,
    first: jax.Array,
    vocab_size: int,
    temperatures: Sequence[jax.Array],
    tokens: jax.Array | None,
) -> Side:
    """The whole vocabulary's statistics from those of all shards, ``[shards, rows, C]`` each."""
    tops = stat["top"][:, 0]
    top, winner = jnp.max(tops, axis=0), jnp.argmax(tops, axis=0)
    argmax = jnp.take_along_axis(stat["argmax"][:, 0], winner[None], axis=0)[0]

    def log_sum_exp(sums: jax.Array) -> list[jax.Array]:
        total = [jnp.sum(sums[:, k] * jnp.exp((tops - top) / t), axis=0) for k, t in enumerate(temperatures)]
        tiny = jnp.finfo(z.dtype).tiny  # nothing left outside: far below LOWEST, and finite
        logs = [jnp.where(x > 0, jnp.log(jnp.maximum(x, tiny)), 2 * LOWEST) for x in total]
        return [top / t + log for t, log in zip(temperatures, logs, strict=True)]

    side = Side(z, slope, first, argmax, jnp.sum(stat["label"][:, 0], axis=0), log_sum_exp(stat["exp"]), vocab_size)
    if tokens is None:
        return side
    selected = (tokens, jnp.sum(stat["inside"], axis=0).T, log_sum_exp(stat["outside"]))
    return Side(z, slope, first, argmax, side.at_label, side.lse, vocab_size, *selected)


def likeliest(k: int, axes: tuple[str, ...], z: Float[Array, "C V"], first: jax.Array) -> Int[Array, "C k"]:
    """Global numbers of each token's k highest logits, over all shards of the vocabulary."""
    k = min(k, z.shape[1] * axis_size(axes))
    values, columns = lax.top_k(z, min(k, z.shape[1]))
    numbers = (columns + first).astype(z.dtype)
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
