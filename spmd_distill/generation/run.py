"""Prompts in, continuations out: what is checked, how batches are shaped, which program runs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_distill.distributed import fetch
from spmd_distill.errors import UserError
from spmd_distill.generation.loop import NONE, Generation, Prompt, State
from spmd_distill.generation.sampling import GREEDY, Kind, Numbers, Sampling
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import Model
from spmd_distill.sharding import REPLICATED
from spmd_distill.types import Params

LEAST = 16
"""Prompts and continuations have room for so many tokens at least."""
END_IDS = 4
"""Ids that end a row are padded to a multiple of so many."""

OnTokens = Callable[[list[np.ndarray]], None]
"""Called with the ids that came since the last call, int32, one array a prompt."""


def generate(
    model: Any,
    params: Params,
    mapper: AbstractMapper,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = GREEDY,
    eos_ids: Sequence[int] = (),
    pad_id: int = 0,
    compute_dtype: Any = "float32",
    vocab_size: int | None = None,
    seed: int = 0,
    on_tokens: OnTokens | None = None,
) -> list[np.ndarray]:
    """Continue prompts on the mesh of ``mapper``, all in one batch.

    Prompts of any lengths are read in one pass and then continued a token at a time; keys and values of what was read
    are remembered, cut over the mesh as the layout cuts heads and rows. The same seed draws the same tokens under every
    layout and mapper, as far as rounding leaves their probabilities the same. A layout's rule ``length`` is not
    followed. Reading and continuing is one program. It is compiled anew for another number of prompts, length or
    ``max_new_tokens`` only where that crosses 2^n or 3 * 2^n, and not for other numbers in ``sampling``.

    Args:
        model: One of this library's decoders (`Model`).
        params: Its parameters, where ``mapper`` keeps them.
        mapper: The mapper, with its layout.
        prompts: Token ids, an array or list a prompt.
        max_new_tokens: How many tokens each row may get.
        sampling: How a token is chosen; by default the likeliest.
        eos_ids: Tokens that end a row. It is over when all rows have ended.
        pad_id: A token for places that nothing looks at.
        compute_dtype: Of matmuls, activations and the cache.
        vocab_size: Only tokens below it are chosen: those that the tokenizer has, say. None: all of the model's.
        seed: Of what is drawn. Prompts in other places of the list draw otherwise.
        on_tokens: Called after every token with the new ids of each prompt (one, or none if it has ended). The tokens
            are the same, but the host looks at each.

    Returns:
        The new ids of every prompt, int32, the id that ended it included.

    Raises:
        UserError: A prompt is empty or holds something else than ids of the model; a number is out of its range.
    """
    if not isinstance(model, Model):
        raise UserError(
            f"generate: the model is a {type(model).__name__}; expected one of this library's decoders (`decoder`, "
            f"`load_pretrained`), which have a cache."
        )
    tokens = model.config.tokens
    limit = _whole(max_new_tokens, "max_new_tokens", 1)
    vocab = tokens if vocab_size is None else _whole(vocab_size, "vocab_size", 1, tokens)
    ends = [_whole(x, "eos_ids", 0, tokens - 1) for x in eos_ids]
    rows = [_checked(prompt, number, tokens) for number, prompt in enumerate(prompts)]
    numbers = {
        **sampling.numbers(_whole(seed, "seed", 0, 2**32 - 1)),
        "eos": np.array(ends + [NONE] * (-len(ends) % END_IDS or END_IDS * (not ends)), np.int32),
        "pad": np.int32(_whole(pad_id, "pad_id", 0, tokens - 1)),
        "until": np.int32(limit),
    }
    if not rows:
        return []
    prompt = _batched(rows, mapper.layout.batch_shards)
    dtype = jnp.dtype(compute_dtype).name
    whole, start, further = _programs(model, mapper, dtype, vocab, sampling.kind, _bucket(limit, LEAST))
    if on_tokens is None:
        return _texts(whole(params, prompt, numbers), len(rows))
    state = start(params, prompt, numbers)
    for count in range(1, limit + 1):
        column = fetch(state["new"])[: len(rows), count - 1 : count]
        on_tokens([row[row != NONE] for row in column])
        if count == limit or not fetch(state["going"]):
            break
        state = further(params, prompt, {**numbers, "until": np.int32(count + 1)}, state)
    return _texts(state["new"], len(rows))


@functools.lru_cache(maxsize=32)
def _programs(
    model: Model, mapper: AbstractMapper, dtype: str, vocab_size: int, kind: Kind, room: int
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Three jitted functions: to the end; to the first token; from a state on. They are compiled when called."""
    layout = mapper.layout.with_whole_rows()
    one = Generation(model, layout, dtype, vocab_size, kind, room)
    table, states = layout.spec(("batch", None)), one.state_specs()
    given = (model.specs(layout), {"tokens": table, "lengths": layout.spec(("batch",))}, REPLICATED)

    def whole(params: Params, prompt: Prompt, numbers: Numbers) -> jax.Array:
        return one.run(params, prompt, numbers, one.start(params, prompt, numbers))["new"]

    def further(params: Params, prompt: Prompt, numbers: Numbers, state: State) -> State:
        return one.run(params, prompt, numbers, state)

    donated = (3,) if mapper.name == "shard_map" else ()  # the others cut and join a state, which is a copy
    return (
        jax.jit(mapper.map(whole, given, table)),
        jax.jit(mapper.map(one.start, given, states)),
        jax.jit(mapper.map(further, (*given, states), states), donate_argnums=donated),
    )


def _batched(rows: Sequence[np.ndarray], shards: int) -> Prompt:
    """All prompts, padded on the left, and rows of length 0 that make up the batch."""
    count = shards * _bucket(-(-len(rows) // shards), 1)
    width = _bucket(max(len(row) for row in rows), LEAST)
    tokens, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
    for i, row in enumerate(rows):
        tokens[i, width - len(row) :], lengths[i] = row, len(row)
    return {"tokens": tokens, "lengths": lengths}


def _bucket(n: int, least: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24 ... that is no less than either."""
    n = max(n, least)
    power = 1 << (n - 1).bit_length()
    return 3 * power // 4 if power >= 4 and n <= 3 * power // 4 else power


def _texts(new: jax.Array, count: int) -> list[np.ndarray]:
    return [row[row != NONE] for row in fetch(new)[:count]]


def _checked(prompt: Any, number: int, tokens: int) -> np.ndarray:
    """One prompt as int32 ids; raise `UserError` with the prompt's number where it is something else."""
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of different lengths
        ids = np.asarray(None)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        found = f"an array of {ids.dtype} {list(ids.shape)}" if hasattr(prompt, "dtype") else repr(prompt)[:60]
        raise UserError(f"prompt {number} is {found}; expected one row of token ids, such as tokenizer.encode(text).")
    if not ids.size:
        raise UserError(f"prompt {number} is empty; expected at least one token (the BOS token, say).")
    wrong = np.flatnonzero((ids < 0) | (ids >= tokens))
    if wrong.size:
        raise UserError(
            f"prompt {number}: id {ids[wrong[0]]} at position {wrong[0]} is none of the model's, which are 0 to "
            f"{tokens - 1}. Encode it with the model's own tokenizer."
        )
    return ids.astype(np.int32)


def _whole(x: Any, name: str, least: int, most: int | None = None) -> int:
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < least or (most is not None and x > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UserError(f"generate: {name}: {x!r} was given; expected a whole number {bounds}.")
    return int(x)
