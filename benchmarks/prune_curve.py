"""What fewer layers cost before any training: held-out KL by the number of layers kept, for each way of choosing them.

``python benchmarks/prune_curve.py [--depths 28 25 ...] [--orders uniform importance] [--png PATH]`` takes the
demo's teacher, SmolLM2-135M-Instruct, and the demo's text. Importance is measured on ``--calibration-rows`` rows of the
training part, KL to the whole model on ``--heldout-rows`` rows of the held-out part, both of ``--length`` tokens.
``one-by-one`` measures all that is left again after every removal: half an hour on two cores.
"""

import argparse
import sys
from typing import Any

from _report import OURS, Row, report

NAME = "prune-curve"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[28, 25, 20, 15, 12, 10, 8])
    parser.add_argument("--orders", nargs="+", default=["uniform", "importance"])
    parser.add_argument("--calibration-rows", type=int, default=8)
    parser.add_argument("--heldout-rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--png", metavar="PATH", help="also as a plot")
    parser.add_argument("--json", metavar="PATH", help="also as JSON; - is stdout")
    options = parser.parse_args()
    curves = measure(options)
    rows = [
        Row(NAME, OURS, {"order": order, "layers": depth, "kept": " ".join(map(str, kept))}, "held-out KL", kl, "nats")
        for order, points in curves.items()
        for depth, (kept, kl) in points.items()
    ]
    if options.png:
        plot(curves, options.png)
    raise SystemExit(not report(rows, options.json, "Layers kept of SmolLM2-135M's 30, before any training"))


def measure(options: argparse.Namespace) -> dict[str, dict[int, tuple[tuple[int, ...], float]]]:
    from spmd_distill.loading import documents, open_checkpoint
    from spmd_distill.mappers import make_mapper
    from spmd_distill.prune import Keep, agreement, cut, evenly, measure_removals
    from spmd_distill.prune.command import calibration_batches

    checkpoint, mapper = open_checkpoint("demo"), make_mapper("shard_map", "single")
    model, params = checkpoint.model, checkpoint.load(mapper)
    depth = model.config.layers
    parts = documents(["demo"], [])
    counts = options.calibration_rows, options.heldout_rows
    calibration, heldout = (
        calibration_batches(texts, checkpoint.tokenizer, options.length, count, mapper, "the demo's")
        for texts, count in zip(parts, counts, strict=True)
    )

    measured = measure_removals(model, params, mapper, calibration)

    def costs(layers: Any, removed: Any) -> Any:
        say(f"measuring {len(layers)} layers, {len(removed)} removed")
        return measured(layers, removed)

    orders: dict[str, Any] = {}
    if "uniform" in options.orders:
        orders["uniform"] = lambda count: evenly(depth, count)
    if "importance" in options.orders:
        alone = costs(range(depth), []).argsort()  # the cheapest first
        orders["importance"] = lambda count: tuple(sorted(int(i) for i in alone[depth - count :]))
    if "one-by-one" in options.orders:
        removed: list[int] = []
        while len(removed) < depth - min(options.depths):
            left = [i for i in range(depth) if i not in removed]
            removed.append(left[int(costs(left, removed).argmin())])
        orders["one-by-one"] = lambda count: tuple(i for i in range(depth) if i not in removed[: depth - count])
    curves: dict[str, Any] = {}
    for order, chosen in orders.items():
        for count in options.depths:
            kept = chosen(count)
            small, student = cut(params, model, Keep(layers=kept), mapper)
            kl = agreement(student, small, model, params, mapper, heldout)["kl"]
            say(f"{order}, {count} layers: {kl:.3f}")
            curves.setdefault(order, {})[count] = kept, kl
    return curves


def plot(curves: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for order, points in curves.items():
        axes.plot(list(points), [kl for _, kl in points.values()], marker="o", label=order)
    axes.set(xlabel="layers kept of 30", ylabel="held-out KL (nats a token)")
    axes.invert_xaxis()
    axes.set_xticks(sorted({depth for points in curves.values() for depth in points}))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
