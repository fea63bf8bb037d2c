"""Data: how fast text becomes tokens, tokens rows, and rows batches, beside the time of a training step.

    python benchmarks/data.py [--text FILE.txt ...] [--teacher FOLDER or FILE]

Without arguments, on the demo's text with the demo's tokenizer. The last part trains a small random pair of models on
the rows and counts the steps that waited for data, with and without prefetching. Figures of one run on a shared
machine: the ratios say more than the rates.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd_distill.runtime import prepare_jax

ROWS, MICRO_BATCHES = 8, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="*", default=["demo"], help="sources as in data.train")
    parser.add_argument("--teacher", default="demo", help="whose tokenizer to take")
    parser.add_argument("--tokens", type=int, default=400_000, help="tokenise about so many")
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--steps", type=int, default=20, help="training steps of the last part; 0 leaves it out")
    options = parser.parse_args()
    prepare_jax()
    from spmd_distill.loading import documents, open_checkpoint, shortened

    tokenizer = open_checkpoint(options.teacher).tokenizer
    texts = shortened(documents(options.text, [])[0], options.tokens)
    found: dict[str, Any] = {"documents": len(texts), "characters": sum(len(text.text) for text in texts)}
    # paragraphs stand for records of usual size: whole plays are longer than any row, and say nothing about packing
    paragraphs = [part for text in texts for part in text.text.split("\n\n") if part.strip()]
    found["paragraphs"] = len(paragraphs)
    with tempfile.TemporaryDirectory() as folder:
        table, figures = tokenising(paragraphs, tokenizer, Path(folder))
    found |= figures
    found["packing"] = [packing(table, length) for length in options.lengths]
    found["batches"] = [materialising(table, length) for length in options.lengths]
    if options.steps:
        found["steps"] = [waiting(table, tokenizer.vocab_size, options.steps, depth) for depth in (0, 2)]
    print(json.dumps(found, indent=1))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def tokenising(paragraphs: list[str], tokenizer: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Tokens a second from a JSON Lines file: in one process, in two, and out of the cache."""
    from spmd_distill.data import make_encoder, open_source
    from spmd_distill.data.tokens import Settings, token_table

    file = folder / "paragraphs.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs))
    source, encoder = open_source(file), make_encoder(tokenizer)
    one, (table, _) = timed(lambda: token_table(source, encoder, Settings(workers=1)))
    two, _ = timed(lambda: token_table(source, encoder, Settings(workers=2)))
    cache = Settings(folder / "cache", workers=1)
    token_table(source, encoder, cache)
    again, _ = timed(lambda: token_table(source, encoder, cache))
    tokens = len(table.tokens)
    rates = {"one process": tokens / one, "two processes": tokens / two, "verified from the cache": tokens / again}
    return table, {"tokens": tokens, "tokens a second": {name: round(rate) for name, rate in rates.items()}}


def packing(table: Any, length: int) -> dict[str, Any]:
    """Tokens a second, and how full rows are, of each way to pack."""
    from spmd_distill.data import plan

    figures: dict[str, Any] = {"length": length}
    for how in ("first_fit", "concatenate", "none"):
        seconds, made = timed(lambda how=how: plan(table, length, how))
        figures[how] = {"tokens a second": round(len(table.tokens) / seconds), "full": round(made.density, 4)}
        if how == "concatenate":  # what first_fit keeps whole
            cut = int((~made.goes_on).sum())
            figures[how]["pieces a document"] = round(len(made.sizes) / max(cut, 1), 3)
    return figures


def materialising(table: Any, length: int) -> dict[str, Any]:
    """Tokens a second of putting batches together."""
    from spmd_distill.data import Loader, PackedRows, plan

    loader = Loader(PackedRows(table, plan(table, length, "first_fit")), 64, 1, seed=0)
    seconds, _ = timed(lambda: [loader.batch(step) for step in range(20)])
    return {
        "length": length,
        "rows": 64,
        "milliseconds": round(50 * seconds, 2),
        "tokens a second": round(20 * 64 * length / seconds),
    }


def waiting(table: Any, vocab_size: int, steps: int, depth: int) -> dict[str, Any]:
    """Seconds a step of a small pair of models, how long it waited for data, and in what share of the steps."""
    import jax
    import optax

    import spmd_distill as sd
    from spmd_distill.data import Loader, PackedRows, Prefetch, plan

    sizes = sd.DecoderConfig(vocab_size=vocab_size, width=128, layers=2, heads=4, kv_heads=4, head_dim=32, mlp=256)
    model, mapper = sd.decoder(sizes), sd.make_mapper("shard_map", "single")
    objective = sd.Objective.mix(sd.ForwardKL())
    run = sd.Distillation(model, sd.OnlineTeacher(model), objective, mapper, sd.FusedHead())
    tx = optax.sgd(1e-3)
    params, teacher = (sd.init_params(model, mapper, seed=seed) for seed in (0, 1))
    state, step = sd.create_state(run, tx, params, seed=0), run.train_step(tx)
    shardings = mapper.shardings(run.batch_specs(1))
    loader = Loader(PackedRows(table, plan(table, 128, "first_fit")), ROWS, MICRO_BATCHES, seed=0)
    took, waited = [], []
    with Prefetch(loader.batch, 0, steps + 2, depth) as batches:
        for k in range(steps + 2):
            began = time.perf_counter()
            batch = jax.device_put(batches.get(k), shardings)
            state, _ = jax.block_until_ready(step(state, teacher, batch))
            took.append(time.perf_counter() - began)
            waited.append(batches.waited)
    took, waited = took[2:], waited[2:]  # the first two compile and warm up
    return {
        "prefetch": depth,
        "milliseconds a step": round(1000 * sum(took) / steps, 2),
        "waited": round(1000 * sum(waited) / steps, 3),
        "share of the time": round(sum(waited) / sum(took), 5),
        "share of steps that waited 1 ms or more": sum(w >= 1e-3 for w in waited) / steps,
    }


if __name__ == "__main__":
    main()
