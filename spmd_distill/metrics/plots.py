"""``curves.png``: what a run measured, as one picture."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmd_distill.errors import cannot_write
from spmd_distill.metrics.reading import read_metrics
from spmd_distill.metrics.table import perplexity


def plot_curves(folder: str | os.PathLike[str]) -> Path:
    """Draw ``curves.png`` from the ``metrics.jsonl`` of a run: a panel for every group of metrics it has.

    Returns:
        The path of the picture.

    Raises:
        UserError: the picture cannot be written.
    """
    from matplotlib.figure import Figure  # half a second to import, and needed once a run

    curves: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    for line in read_metrics(folder):
        if line.set is not None:
            continue
        for name, value in line.values.items():
            steps, numbers = curves.setdefault((line.split, name), ([], []))
            steps.append(line.step)
            numbers.append(value)
    panels = [
        p
        for p in [*_PANELS[:2], _inside(folder), *_PANELS[2:]]
        if any((split, name) in curves for split in ("train", "eval") for name, *_ in p[2])
    ]
    rows = max(1, math.ceil(len(panels) / 3))
    columns = max(1, math.ceil(len(panels) / rows))
    figure = Figure(figsize=(4.4 * columns, 3.3 * rows), dpi=130, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.1)  # pyright: ignore
    at = [step for steps, _ in curves.values() for step in steps] or [0]
    margin = max(0.04 * (max(at) - min(at)), 0.5)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1, xlim=(min(at) - margin, max(at) + margin))
        _draw(axes, panel, curves)
    if not panels:
        figure.text(0.5, 0.5, "no metrics yet", ha="center", va="center", color="0.4")
    path = Path(folder) / "curves.png"
    try:
        figure.savefig(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def _inside(folder: str | os.PathLike[str]) -> Any:
    """The panel of the terms inside the network, which ``layers.json`` names."""
    try:
        labels = list(json.loads((Path(folder) / "layers.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        labels = []
    colours = (_STUDENT, _HELD_OUT, _SECOND, "#7d4fa3", "#a33b4f", _TEACHER)
    several = len(labels) > 1
    curves = [(label, label if several else "", colours[i % len(colours)]) for i, label in enumerate(labels)]
    return (_INSIDE, "loss per token", curves)


_NATS = "nats per token"
_INSIDE = "Inside the network"
_STUDENT, _TEACHER, _SECOND, _HELD_OUT = "#3465a4", "#7f8c8d", "#3b8f5a", "#d9680f"
_PANELS = [  # title, unit, [(metric, its name in a legend of several, colour)]
    ("Objective", "loss", [("loss", "", _STUDENT)]),
    ("KL to the teacher", _NATS, [("kl", "", _STUDENT)]),
    ("Cross entropy", _NATS, [("ce_student", "student", _STUDENT), ("ce_teacher", "teacher", _TEACHER)]),
    ("Agreement with the teacher", "%", [("top1", "top-1", _STUDENT), ("acceptance", "acceptance", _SECOND)]),
    ("Throughput", "tokens per second", [("tokens_per_second", "", _STUDENT)]),
    ("Gradient before clipping", "global norm", [("grad_norm", "", _STUDENT)]),
    ("Learning rate", "", [("learning_rate", "", _STUDENT)]),
    (
        "Clipped and skipped steps",
        "running count",
        [("clipped_total", "clipped", _STUDENT), ("skipped_total", "skipped", _HELD_OUT)],
    ),
    ("Time", "%", [("data_wait", "waiting for data", _TEACHER), ("mfu", "model FLOPs utilisation", _SECOND)]),
]
_MANY = 150
"""More points than this are drawn faintly, with their moving average on top."""


def _draw(axes: Any, panel: Any, curves: Mapping[tuple[str, str], tuple[list[int], list[float]]]) -> None:
    title, unit, metrics = panel
    percent = 100.0 if unit == "%" else 1.0
    held_out = any(("eval", name) in curves for name, *_ in metrics)
    for name, called, colour in metrics:
        if ("train", name) in curves:
            steps, values = _arrays(curves["train", name], percent)
            label = f"{called}, train" if called and held_out else called or "train"
            if len(steps) > _MANY:
                axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
                values = _moving_average(values, len(values) // 40)
            axes.plot(
                steps,
                values,
                color=colour,
                linewidth=1.6,
                label=label,
                marker="." if len(steps) < 3 else None,
            )
        if ("eval", name) in curves:
            steps, values = _arrays(curves["eval", name], percent)
            label = f"{called}, held-out" if called else "held-out"
            fill = colour if called else _HELD_OUT
            style = {"markersize": 6, "markeredgecolor": "white", "markeredgewidth": 0.8, "zorder": 3}
            axes.plot(steps, values, "o:", color=fill, linewidth=1.0, label=label, **style)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 6:  # one a metric, small
        named = {label.partition(",")[0]: handle for handle, label in zip(handles, labels, strict=True)}
        axes.legend(named.values(), named.keys(), fontsize=6, frameon=False, ncols=2)
    elif len(handles) > 1:
        axes.legend(fontsize=8, frameon=False)
    if title == _INSIDE and len(metrics) > 1 and all(np.all(line.get_ydata() > 0) for line in axes.get_lines()):
        axes.set_yscale("log")  # they have scales of their own
    if title == "Throughput":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    if title == "Cross entropy":
        right = axes.secondary_yaxis("right")  # the same ticks, read as perplexities
        right.yaxis.set_major_formatter(
            lambda ce, _: f"{ppl:,.0f}" if 100 <= (ppl := perplexity(ce)) < 1e9 else f"{ppl:.3g}"
        )
        right.set_ylabel("perplexity", fontsize=9)
        right.tick_params(labelsize=8)


def _arrays(curve: tuple[list[int], list[float]], scale: float) -> tuple[Any, Any]:
    values = np.asarray(curve[1], dtype=float) * scale
    return np.asarray(curve[0]), np.where(np.isfinite(values), values, np.nan)


def _moving_average(values: Any, width: int) -> Any:
    """Centred mean over ``width`` points; a NaN stays where it is and spoils no neighbour."""
    good = np.isfinite(values)
    window = np.ones(max(width, 1))
    total = np.convolve(np.where(good, values, 0.0), window, "same")
    return np.where(good, total / np.maximum(np.convolve(good, window, "same"), 1), np.nan)
