"""Pairs of layers of a run: what its terms inside the network compare, found where the run file asks for the best.

``layers.json`` of the run folder has them, so that a resumed run compares the same layers. They are found once, when a
run starts: on a few training rows, with the teacher and the student as it starts.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from rich.markup import escape

from spmd_distill.build import Setup
from spmd_distill.compose import unmatched, with_pairs
from spmd_distill.data import AbstractRows, eval_batches
from spmd_distill.distributed import all_or_none, from_first, is_first
from spmd_distill.errors import UserError
from spmd_distill.features import Pairs
from spmd_distill.features.matching import TOKENS, best_pairs, layer_similarity
from spmd_distill.loading import Say
from spmd_distill.metrics import plot_similarity
from spmd_distill.runfolder import RunFolder

FILE = "layers.json"
"""By the label of a term: ``taps``, ``layers`` (as the run file has them), ``pairs``, and of the best ones ``cka``, a
row a layer of the student."""


Wanted = Mapping[str, tuple[tuple[str, ...], int | None]]
"""Terms by label: their tap points, and of how many layers."""
Stage = Callable[[str], AbstractContextManager[None]]
"""Shows that something is under way."""


def pair_layers(setup: Setup, rows: AbstractRows, folder: RunFolder, going_on: bool, stage: Stage, say: Say) -> Setup:
    """The parts of a run with its pairs of layers, which are left in the folder; found anew unless it is ``going_on``.

    Raises `UserError` where a run that goes on has lost them. All processes of a run call it together.
    """
    if not setup.run.inside.compared:
        return setup
    wanted = unmatched(setup.run.objective)
    known = all_or_none(lambda: _known(folder, wanted), first_only=True) if going_on else None
    if going_on:
        found = {label: (known or {}).get(label, {}) for label in wanted}
    else:
        found = _compared(setup, rows, wanted, stage)
    pairs = {label: _pairs(from_first(json.dumps(entry.get("pairs")))) for label, entry in found.items()}
    setup = _paired(setup, pairs)
    left = {label: found.get(label, entry) for label, entry in _given(setup).items()}
    if is_first():
        for label in wanted:
            say(escape(_said(label, left[label])))
    all_or_none(lambda: _leave(folder, left), first_only=True)
    return setup


def paired_as_in(setup: Setup, folder: RunFolder) -> Setup:
    """The parts of a run that was made before, with its pairs. Raises `UserError` where these are lost."""
    wanted = unmatched(setup.run.objective)
    return _paired(setup, {label: _pairs(json.dumps(x["pairs"])) for label, x in _known(folder, wanted).items()})


def check_paired(setup: Setup) -> None:
    """Raise `UserError` where layers are to be the best ones and no run has found them."""
    if found := unmatched(setup.run.objective):
        raise UserError(
            f"objective: {', '.join(found)}: best layers are found when a run starts; give pairs of layers."
        )


def _paired(setup: Setup, pairs: Mapping[str, Pairs]) -> Setup:
    return replace(setup, run=replace(setup.run, objective=with_pairs(setup.run.objective, pairs))) if pairs else setup


def _compared(setup: Setup, rows: AbstractRows, wanted: Wanted, stage: Stage) -> dict[str, dict[str, Any]]:
    """The entries of `FILE` for terms whose layers are to be the best ones; a comparison of several taps is a mean."""
    if not wanted:
        return {}
    with stage("comparing the layers of teacher and student"):
        similarity = _similarity(setup, rows, sorted({tap for taps, _ in wanted.values() for tap in taps}))
    found = {}
    for label, (taps, count) in wanted.items():
        cka = np.mean([similarity[tap] for tap in taps], 0)
        found[label] = _asked(taps, count) | {"pairs": best_pairs(cka, count), "cka": np.round(cka.astype(float), 6)}
    return found


def _leave(folder: RunFolder, entries: Mapping[str, Mapping[str, Any]]) -> None:
    folder.write_json(FILE, entries)
    if shown := {label: entry for label, entry in entries.items() if "cka" in entry}:
        plot_similarity(folder.path, shown)


def _asked(taps: tuple[str, ...], count: int | None) -> dict[str, Any]:
    return {"taps": list(taps), "layers": "best" if count is None else {"best": count}}


def _given(setup: Setup) -> dict[str, dict[str, Any]]:
    compared = setup.run.inside.compared
    return {c.label: {"taps": c.loss.taps, "layers": "given", "pairs": c.pairs} for c in compared}


def _similarity(setup: Setup, rows: AbstractRows, taps: list[str]) -> dict[str, np.ndarray]:
    """CKA of all layers on training rows spread over the text: as few as give `TOKENS` tokens on every layout."""
    run, config = setup.run, setup.config
    shards = run.mapper.layout.batch_shards
    count = math.ceil(TOKENS / (config.data.length * shards)) * shards
    (batch, *_) = eval_batches(rows.spread(count), count)
    teacher = setup.pair.load_teacher(run.mapper)
    student = setup.pair.start_student(teacher, run.mapper, config.seed)
    return layer_similarity(
        setup.pair.student, student, setup.pair.teacher, teacher, run.mapper, batch, taps, run.compute_dtype
    )


def _known(folder: RunFolder, wanted: Wanted) -> dict[str, dict[str, Any]]:
    """What the folder has for these terms. Raises `UserError` where it does not have all of them."""
    if not wanted:
        return {}
    path = folder.path / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for label, (taps, count) in wanted.items():
            entry = found[label]
            if not entry.items() >= _asked(taps, count).items():
                raise ValueError(f"{label} was found for {entry['layers']} at {', '.join(entry['taps'])}")
            for s, t in entry["pairs"]:
                float(entry["cka"][s][t])
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise UserError(
            f"{path}: it does not say which layers this run compares ({', '.join(wanted)}: layers best): "
            f"{type(error).__name__}: {error}. They are found when a run starts. Put the file back, or give pairs in "
            f"the place of best and go on with --allow-changes."
        ) from error
    return {label: found[label] for label in wanted}


def _pairs(text: str) -> Pairs:
    return tuple((int(s), int(t)) for s, t in json.loads(text) or ())


def _said(label: str, entry: Mapping[str, Any]) -> str:
    shown = [f"{s}-{t} ({entry['cka'][s][t]:.3f})" for s, t in entry["pairs"]]
    if len(shown) > 8:
        shown = [*shown[:4], "...", *shown[-3:]]
    return f"{label} at {', '.join(entry['taps'])}, best layers by CKA: {' '.join(shown)}"
