"""``layers.png``: how much the layers of student and teacher look alike, and which of them a run compares."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmd_distill.errors import cannot_write


def plot_similarity(folder: str | os.PathLike[str], found: Mapping[str, Mapping[str, Any]]) -> Path:
    """Draw ``layers.png``: a panel a term, its CKA as colours, its pairs of layers as dots.

    ``found`` is what ``layers.json`` holds, of the terms that have a ``cka [student's layers, teacher's layers]``.

    Raises:
        UserError: the picture cannot be written.
    """
    from matplotlib.figure import Figure  # half a second to import, and needed once a run

    figure = Figure(figsize=(5.2 * max(len(found), 1), 4.4), dpi=130, layout="constrained")
    for i, (label, entry) in enumerate(found.items()):
        axes = figure.add_subplot(1, len(found), i + 1)
        image = axes.imshow(np.asarray(entry["cka"]), origin="lower", aspect="auto", vmin=0, vmax=1, cmap="viridis")
        student, teacher = zip(*entry["pairs"], strict=True)
        axes.plot(teacher, student, "o", color="white", markeredgecolor="black", markersize=6)
        axes.set_title(f"{label} at {', '.join(entry['taps'])}", fontsize=11, loc="left")
        axes.set_xlabel("layer of the teacher", fontsize=9)
        axes.set_ylabel("layer of the student", fontsize=9)
        axes.set_xticks(_ticks(np.shape(entry["cka"])[1]))
        axes.set_yticks(_ticks(np.shape(entry["cka"])[0]))
        axes.tick_params(labelsize=8)
        figure.colorbar(image, ax=axes, label="linear CKA")
    path = Path(folder) / "layers.png"
    try:
        figure.savefig(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def _ticks(count: int) -> list[int]:
    return list(range(0, count, max(1, round(count / 8))))
