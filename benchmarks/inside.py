"""Whether losses inside the network help: held-out KL of a pruned student by optimizer steps, with and without them.

``python benchmarks/inside.py [--variants NAME ...] [--steps 60] [--seed 0] [--folder DIR] [--png PATH] [--json PATH]``
trains the demo's student, 12 of SmolLM2-135M-Instruct's 30 layers, on the demo's text, once a variant: the same
start, the same rows in the same order, the same logit distillation. Each layer of the student is compared with the
teacher's that it was made of. Every variant is a run folder, is resumed where it was interrupted, and is not run again
once it is done. On two cores a variant takes about ten minutes.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from _report import OURS, Row, report

NAME = "inside"


def variants(layers: tuple[int, ...]) -> dict[str, list[dict[str, Any]]]:
    """What each adds to the objective, for a student made of these layers of its teacher."""
    every = [list(pair) for pair in enumerate(layers)]
    cosine = {"feature": {"hidden_states": {"distance": "cosine"}}, "layers": every}
    relations = {"feature": {"minilm_relations": {"relations": "queries_keys_values"}}, "layers": every[-1:]}
    return {
        "logits": [],
        "logits + hidden states": [cosine],
        "logits + hidden states, let go": [cosine | {"weight": {"linear": [1.0, 0.0, 40]}}],
        "logits + MiniLM relations": [relations],
        "logits + MiniLM relations, all layers": [relations | {"layers": every}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="some of them (default: all)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the order of rows")
    parser.add_argument("--folder", default="runs/inside")
    parser.add_argument("--png", metavar="PATH", help="also as a plot")
    parser.add_argument("--json", metavar="PATH", help="also as JSON; - is stdout")
    options = parser.parse_args()
    curves = measure(options)
    shared = {"steps": options.steps, "seed": options.seed, "tokens a step": options.rows * options.length}
    rows = [
        Row(NAME, OURS, {"objective": name, "step": step, **shared}, "held-out KL", kl, "nats")
        for name, points in curves.items()
        for step, kl in points.items()
    ]
    if options.png:
        plot(curves, options.png)
    raise SystemExit(not report(rows, options.json, "12 of SmolLM2-135M's 30 layers, by what it learns from"))


def measure(options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Each variant's held-out KL by optimizer steps."""
    from spmd_distill.config import parse_config
    from spmd_distill.metrics import read_metrics
    from spmd_distill.runtime import prepare_jax, run_files_folder

    prepare_jax(1)
    from spmd_distill.train import distil

    given = ["--mesh=single", f"--steps={options.steps}", "--eval.every=10", "--eval.prompts=[]"]
    given += [f"--data.length={options.length}", f"--data.rows={options.rows}", f"--seed={options.seed}"]
    layers = parse_config([], run_files_folder() / "cpu.yaml").student.layers
    known, curves = variants(layers), {}
    for name in options.variants or known:
        folder = Path(options.folder) / name.replace(", ", "-").replace(" ", "-")
        print(f"{name}: {folder}", file=sys.stderr, flush=True)
        features = [f"--objective.features={known[name]}"] if known[name] else []
        config = parse_config([*given, f"--run={folder}", *features], run_files_folder() / "cpu.yaml")
        if not (folder / "student").exists():
            distil(config, resume="auto")
        curves[name] = {
            line.step: line.values["kl"] for line in read_metrics(folder) if line.split == "eval" and line.set is None
        }
    return curves


def plot(curves: dict[str, dict[int, float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, points in curves.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    axes.set(xlabel="optimizer step", ylabel="held-out KL (nats a token)", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
