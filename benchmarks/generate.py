"""Greedy generation with the demo's teacher on one device: with a cache, and by passes over whole rows.

``python benchmarks/generate.py [--json PATH]`` continues four prompts of a few words by 32 tokens each, by flags, with

- spmd_distill: `generate`, which reads the prompts once and keeps keys and values;
- ``whole rows``: the same model, which reads the whole rows again for every token, in one program too.

Measured are new tokens a second of all rows together by the wall, the best of ``--rounds`` calls in turn after one that
compiles, and how many tokens differ (none may, and the exit code is 1 if any does). ``--layout`` takes another layout,
``--sampling`` adds rows of `generate` with temperature, top-p and top-k.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _report import OURS, Row, report

NAME, WHOLE = "generate", "whole rows"
PROMPTS = ("The capital of France is", "Once upon a time", "In Python, a list", "To be, or not to be, that is")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="demo", help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--layout", default="single")
    parser.add_argument("--tokens", type=int, default=32, help="new ones a prompt")
    parser.add_argument("--repeat", type=int, default=1, help="how often each prompt is repeated, to make it longer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sampling", action="store_true", help="also what drawing costs")
    parser.add_argument("--json", metavar="PATH", help="also as JSON; - is stdout")
    options = parser.parse_args()
    import spmd_distill as sd

    sd.prepare_jax()
    loaded = sd.load_pretrained(options.teacher, options.layout)
    prompts = [loaded.tokenizer.encode(" ".join([text] * options.repeat)) for text in PROMPTS]

    def ours(sampling: sd.Sampling) -> Callable[[], Any]:
        how: dict[str, Any] = {"max_new_tokens": options.tokens, "sampling": sampling}
        return lambda: sd.generate(loaded.model, loaded.params, loaded.mapper, prompts, **how)

    ways: dict[str, Callable[[], Any]] = {"greedy": ours(sd.Sampling())}
    ways[WHOLE] = whole_rows(loaded, prompts, options.tokens)
    if options.sampling:
        ways |= {"temperature": ours(sd.Sampling(0.8)), "top-p": ours(sd.Sampling(0.8, top_p=0.95))}
        ways |= {"top-k and top-p": ours(sd.Sampling(0.8, top_p=0.95, top_k=50))}
    found = {name: way() for name, way in ways.items()}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(options.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - began)
    shape = {
        "layout": options.layout,
        "prompts": len(prompts),
        "longest": max(map(len, prompts)),
        "new": options.tokens,
    }
    rows = []
    for name, seconds in best.items():
        library, choice = (name, "greedy") if name == WHOLE else (OURS, name)
        speed = len(prompts) * options.tokens / seconds
        rows.append(Row(NAME, library, shape | {"choice": choice}, "speed", speed, "tokens/s"))
    wrong = sum(int((a != b).sum()) for a, b in zip(found["greedy"], found[WHOLE], strict=True))
    setting = shape | {"choice": "greedy"}
    rows.append(Row.at_most(NAME, OURS, setting, "tokens that differ from whole rows", wrong, "tokens", 0))
    raise SystemExit(not report(rows, options.json, "Generation, float32"))


def whole_rows(loaded: Any, prompts: list[np.ndarray], count: int) -> Callable[[], list[np.ndarray]]:
    """The same continuation without a cache; for layouts that cut neither the sequence nor the vocabulary over data."""
    import jax
    import jax.numpy as jnp

    from spmd_distill.collectives import gather_stacked, same_on, shard_index
    from spmd_distill.head.base import logits_of
    from spmd_distill.models import Shard
    from spmd_distill.types import Batch

    model, params, mapper = loaded.model, loaded.params, loaded.mapper
    layout = mapper.layout
    if layout.sequence_sharded or layout.shared_axes:
        raise SystemExit(f"{layout.name} cuts the sequence, or the vocabulary over data: take another layout.")
    total = -(-len(prompts) // layout.batch_shards) * layout.batch_shards
    tokens = np.zeros((total, max(map(len, prompts)) + count), np.int32)
    lengths = np.ones(total, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)], lengths[i] = prompt, len(prompt)

    def body(params: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        rows, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))

        def append(k: jax.Array, tokens: jax.Array) -> jax.Array:
            batch = Batch(tokens, tokens, tokens >= 0, positions, jnp.ones_like(tokens))
            out = model.apply(params, batch, Shard(layout, jnp.dtype("float32")))
            last = out.hidden.reshape(rows, length, -1)[jnp.arange(rows), lengths + k - 1]
            first = shard_index(layout.vocab_axes) * out.unembed.shape[0]
            logits, _ = logits_of(out, last, first)
            best = gather_stacked(jnp.max(logits, axis=1), layout.vocab_axes)
            which = gather_stacked(jnp.argmax(logits, axis=1).astype(jnp.int32) + first, layout.vocab_axes)
            winner = jnp.take_along_axis(which, jnp.argmax(best, axis=0)[None], axis=0)[0]
            return tokens.at[jnp.arange(rows), lengths + k].set(same_on(winner, "model"))

        return jax.lax.fori_loop(0, count, append, tokens)

    table = layout.spec(("batch", None))
    run = jax.jit(mapper.map(body, (model.specs(layout), table, layout.spec(("batch",))), table))

    def call() -> list[np.ndarray]:
        done = np.asarray(run(params, tokens, lengths))
        return [done[i, len(p) : len(p) + count] for i, p in enumerate(prompts)]

    return call


if __name__ == "__main__":
    main()
