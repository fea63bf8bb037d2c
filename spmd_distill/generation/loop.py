"""What one shard does to continue its rows: read the prompts, then one token at a time, with a cache."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spmd_distill.collectives import all_gather, pmax, shard_index, to_varying, vary_like
from spmd_distill.generation.sampling import Kind, Numbers, choose
from spmd_distill.head.base import logits_of
from spmd_distill.models import Model, Shard
from spmd_distill.models.cache import Cache, empty_cache
from spmd_distill.models.heads import head_plan
from spmd_distill.sharding import REPLICATED, MeshLayout, Specs
from spmd_distill.types import Batch, Params, Unembedded

NONE = -1
"""In place of a token where a row has ended."""

Prompt = dict[str, Any]
"""``tokens [B, P]``, padded on the left, and ``lengths [B]``; 0 for a row that only fills up the batch."""
State = dict[str, Any]
"""What a step changes; see `Generation.start`."""


@dataclass(frozen=True)
class Generation:
    """Generation with one model on one layout, as one shard of it sees it.

    Row r of the prompts ends in column P - 1 of the cache, so that all rows write to the same column; its positions
    count from its first token, and the columns before that belong to segment 0.
    """

    model: Model
    layout: MeshLayout
    """Without the rule ``length``."""
    dtype: Any
    vocab_size: int
    """Tokens from here on are never chosen."""
    kind: Kind
    room: int
    """How many new tokens a row has room for."""

    @property
    def shard(self) -> Shard:
        """What the model runs in."""
        return Shard(self.layout, jnp.dtype(self.dtype))

    # -- the model --------------------------------------------------------------------------------------------------

    def read(self, params: Params, prompt: Prompt) -> tuple[Unembedded, Cache]:
        """All prompts at once: what follows their last tokens (hidden states ``[B, D]``), and the cache with them."""
        width = prompt["tokens"].shape[1]
        return self._read(params, prompt, prompt["tokens"], jnp.int32(width - 1), width + self.room)

    def advance(
        self, params: Params, prompt: Prompt, cache: Cache, tokens: Int[Array, "B room"], step: Int[Array, ""]
    ) -> tuple[Unembedded, Cache]:
        """One token more, the one before ``step`` in ``tokens`` (those chosen so far): as `read`."""
        width = prompt["tokens"].shape[1]
        column = width - 1 + step
        last = lax.dynamic_slice_in_dim(tokens, step - 1, 1, 1)

        def one() -> tuple[Unembedded, Any]:
            batch = _batch(last, prompt, column[None], column)
            out, after = self.model.apply_cached(params, batch, self.shard, cache)
            return out, (after.k, after.v, after.segments)

        def again() -> tuple[Unembedded, Any]:
            whole = jnp.concatenate([prompt["tokens"], tokens], axis=1)
            out, after = self._read(params, prompt, whole, column, width + self.room)
            return out, (after.k, after.v, after.segments)

        # A row that grows beyond the first training's length turns by other frequencies from its first token on
        # (longrope): its keys, and all that deeper layers made of them, have to be computed again.
        config = self.model.config
        limits = {r.original_length for r in (config.rope, config.local_rope) if r and r.kind == "longrope"}
        if not limits:
            out, (k, v, segments) = one()
        else:
            position = column - _begins(prompt)
            crossing = jnp.any(jnp.isin(position, jnp.asarray(sorted(limits))) & (prompt["lengths"] > 0))
            out, (k, v, segments) = lax.cond(pmax(crossing.astype(jnp.int32), self.layout.batch_axes) > 0, again, one)
        return out, Cache(k, v, segments, column + 1, fresh=False)

    def _read(
        self, params: Params, prompt: Prompt, tokens: jax.Array, last: Int[Array, ""], columns: int
    ) -> tuple[Unembedded, Cache]:
        """``tokens`` up to the column ``last``, from an empty cache on."""
        config, layout, rows = self.model.config, self.layout, tokens.shape[0]
        heads = len(head_plan(config.heads, config.kv_heads, layout.sizes["model"]).key_values[0])
        cache = empty_cache(config, rows, columns, heads, self.shard.dtype)
        k, v = to_varying((cache.k, cache.v), (*layout.batch_axes, "model"))
        cache = cache.replace(k=k, v=v, segments=vary_like(cache.segments, tokens))  # type: ignore[attr-defined]
        batch = _batch(tokens, prompt, jnp.arange(tokens.shape[1]), last)
        out, cache = self.model.apply_cached(params, batch, self.shard, cache)
        hidden = lax.dynamic_index_in_dim(out.hidden.reshape(*tokens.shape, -1), last, 1, keepdims=False)
        return replace(out, hidden=hidden), cache

    # -- the choice -------------------------------------------------------------------------------------------------

    def logits(self, out: Unembedded, rows: jax.Array) -> tuple[Float[Array, "N V"], Int[Array, ""], Int[Array, " N"]]:
        """Of this shard's rows of the vocabulary, which begin at the second; of the batch's rows in the third.

        Those are this shard's, or, where vocabulary and batch lie on one axis, those of all its shards.
        """
        out = replace(out, transform=replace(out.transform, vocab_size=self.vocab_size))
        hidden = out.hidden
        for axis in reversed(self.layout.shared_axes):
            hidden, rows = all_gather(hidden, axis), all_gather(rows, axis)
        first = shard_index(self.layout.vocab_axes) * out.unembed.shape[0]
        z, _ = logits_of(out, hidden, first)
        return z, first, rows

    def pick(self, out: Unembedded, step: Int[Array, ""], numbers: Numbers) -> Int[Array, " B"]:
        """The next token of this shard's rows."""
        layout, count = self.layout, out.hidden.shape[0]
        z, first, rows = self.logits(out, shard_index(layout.batch_axes) * count + jnp.arange(count))
        found = choose(z, first, rows, step, self.kind, numbers, layout.vocab_axes)
        if layout.shared_axes:
            found = lax.dynamic_slice_in_dim(found, shard_index(layout.shared_axes) * count, count)
        return found

    # -- the loop ---------------------------------------------------------------------------------------------------

    def start(self, params: Params, prompt: Prompt, numbers: Numbers) -> State:
        """Read the prompts and choose their first tokens.

        Returns the cache's ``k``, ``v`` and ``segments``; ``new [B, room]``, the tokens chosen, `NONE` behind a row's
        end; ``fed``, the same with padding there; ``done [B]``; ``step``, how many were chosen; ``going``, whether any
        row on any shard has not ended.
        """
        out, cache = self.read(params, prompt)
        empty = vary_like(jnp.full((prompt["tokens"].shape[0], self.room), NONE, jnp.int32), prompt["tokens"])
        state = {
            "k": cache.k,
            "v": cache.v,
            "segments": cache.segments,
            "new": empty,
            "fed": empty,
            "done": prompt["lengths"] == 0,
            "step": jnp.int32(0),
        }
        return self._record(state, self.pick(out, state["step"], numbers), numbers)

    def run(self, params: Params, prompt: Prompt, numbers: Numbers, state: State) -> State:
        """Choose tokens until ``numbers["until"]`` of them are there or all rows have ended."""

        def more(state: State) -> Bool[Array, ""]:
            return state["going"] & (state["step"] < numbers["until"])

        def step(state: State) -> State:
            cache = Cache(
                state["k"],
                state["v"],
                state["segments"],
                prompt["tokens"].shape[1] - 1 + state["step"],
                fresh=False,
            )
            out, cache = self.advance(params, prompt, cache, state["fed"], state["step"])
            state = {**state, "k": cache.k, "v": cache.v, "segments": cache.segments}
            return self._record(state, self.pick(out, state["step"], numbers), numbers)

        return lax.while_loop(more, step, state)

    def _record(self, state: State, found: Int[Array, " B"], numbers: Numbers) -> State:
        """The state with one token more in every row."""

        def put(table: jax.Array, column: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(table, column[:, None], state["step"], 1)

        done, ended = state["done"], jnp.isin(found, numbers["eos"])
        after = done | ended
        return {
            **state,
            "new": put(state["new"], jnp.where(done, NONE, found)),
            "fed": put(state["fed"], jnp.where(done, numbers["pad"], found)),
            "done": after,
            "step": state["step"] + 1,
            "going": pmax(jnp.any(~after).astype(jnp.int32), self.layout.batch_axes) > 0,
        }

    def state_specs(self) -> Specs:
        """Where each entry of a state lies: the cache's heads over ``model``, all rows over the batch axes."""
        spec = self.layout.spec
        cache, table, row = spec(("layers", "batch", None, "kv_heads", None)), spec(("batch", None)), spec(("batch",))
        tables = {name: table for name in ("segments", "new", "fed")}
        return {"k": cache, "v": cache, **tables, "done": row, "step": REPLICATED, "going": REPLICATED}


def _begins(prompt: Prompt) -> Int[Array, " B"]:
    """The column of each row's first token."""
    return prompt["tokens"].shape[1] - prompt["lengths"]


def _batch(tokens: Int[Array, "B M"], prompt: Prompt, columns: Int[Array, " M"], last: Int[Array, ""]) -> Batch:
    """Tokens that lie in these columns; those before a row's begin and after ``last`` are padding."""
    place = columns - _begins(prompt)[:, None]
    real = (place >= 0) & (columns <= last)
    positions = jnp.where(real, place, 0)
    return Batch(tokens, tokens, real, positions, real.astype(jnp.int32))
