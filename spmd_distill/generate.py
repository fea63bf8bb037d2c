"""Greedy continuation of prompts, on the mesh a run trains on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_distill.collectives import all_gather, gather_stacked, same_on, shard_index
from spmd_distill.head.base import logits_of
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import Model, Shard
from spmd_distill.types import Batch, Params


def continue_greedily(
    model: Model,
    params: Params,
    mapper: AbstractMapper,
    prompts: Sequence[np.ndarray],
    new_tokens: int,
    compute_dtype: Any = jnp.float32,
    vocab_size: int | None = None,
) -> list[np.ndarray]:
    """Append the ``new_tokens`` most likely tokens to each prompt; int32 ids of prompt and continuation.

    Every new token runs the whole row through the model again: meant for a few short samples, not for serving.
    Vocabulary-parallel: each shard offers its best token, the best of them wins. With ``vocab_size``, only the first
    so many tokens are candidates: those that the tokenizer has, say.
    """
    layout = mapper.layout
    shard = Shard(layout, jnp.dtype(compute_dtype))
    longest = max(len(p) for p in prompts) + new_tokens
    columns = -(-longest // layout.sizes["model"]) * layout.sizes["model"]  # cut evenly where sequences are sharded
    rows = -(-len(prompts) // layout.batch_shards) * layout.batch_shards
    tokens, lengths = np.zeros((rows, columns), np.int32), np.ones(rows, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)], lengths[i] = prompt, len(prompt)

    def body(params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        n, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length), (n, length))

        def append(k: jax.Array, tokens: jax.Array) -> jax.Array:
            batch = Batch(tokens, tokens, tokens > 0, positions, jnp.ones_like(tokens))
            out = model.apply(params, batch, shard)
            if vocab_size is not None and vocab_size < out.transform.vocab_size:
                out = replace(out, transform=replace(out.transform, vocab_size=vocab_size))
            last = out.hidden.reshape(n, length, -1)[jnp.arange(n), lengths + k - 1]
            for axis in reversed(layout.shared_axes):  # their shards see each other's rows
                last = all_gather(last, axis)
            first = shard_index(layout.vocab_axes) * out.unembed.shape[0]
            logits, _ = logits_of(out, last, first)
            best = gather_stacked(jnp.max(logits, axis=1), layout.vocab_axes)
            which = gather_stacked(jnp.argmax(logits, axis=1).astype(jnp.int32) + first, layout.vocab_axes)
            winner = jnp.take_along_axis(which, jnp.argmax(best, axis=0)[None], axis=0)[0]
            if layout.shared_axes:
                winner = jax.lax.dynamic_slice_in_dim(winner, shard_index(layout.shared_axes) * n, n)
            return tokens.at[jnp.arange(n), lengths + k].set(same_on(winner, "model"))

        return jax.lax.fori_loop(0, new_tokens, append, tokens)

    row = layout.spec(("batch", None))
    run = mapper.map(body, (model.specs(layout), row, layout.spec(("batch",))), row)
    done = np.asarray(jax.jit(run)(params, tokens, lengths))
    return [done[i, : len(p) + new_tokens] for i, p in enumerate(prompts)]
