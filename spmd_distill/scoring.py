"""Held-out results: what is scored, and the numbers that come of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from spmd_distill.build import Setup
from spmd_distill.data import AbstractRows, eval_batches
from spmd_distill.guards import find_rows
from spmd_distill.metrics.steplog import metric_values
from spmd_distill.types import Batch, Params


def heldout_batches(setup: Setup, heldout: Mapping[str, AbstractRows]) -> dict[str, list[Batch]]:
    """The batches that an evaluation scores: ``eval.rows`` rows of every set, spread over it."""
    config = setup.config
    return {name: eval_batches(rows.spread(config.eval.rows), config.data.rows) for name, rows in heldout.items()}


def score(
    setup: Setup, step: Any, student: Params, teacher: Params, sets: Mapping[str, Sequence[Batch]], clock: Any
) -> dict[str, float]:
    """Metrics over all sets, averaged over their valid tokens; of several, also each one's own, as ``kl/NAME``."""
    found = {name: setup.run.evaluate(step, student, teacher, batches, clock) for name, batches in sets.items()}
    whole, *others = found.values()
    for metrics in others:
        whole = {key: whole[key] + metrics[key] for key in whole}
    values = metric_values(whole)
    if len(found) > 1:
        for name, metrics in found.items():
            values |= {f"{key}/{name}": value for key, value in metric_values(metrics).items()}
    return values


def bad_rows(
    setup: Setup, step: Any, student: Params, teacher: Params, batch: Batch, names: Sequence[str], clock: Any
) -> list[int]:
    """Which rows of a step's batch ``[A, B, L]`` have a metric of one of these names that is not finite, by number."""

    def bad(rows: list[int]) -> bool:
        chosen = np.isin(np.arange(count), rows).reshape(*batch.mask.shape[:2], 1)
        some: Any = replace(batch, mask=batch.mask & chosen)
        micro = [jax.tree.map(lambda x, i=i: x[i], some) for i in np.flatnonzero(chosen.any((1, 2)))]
        found = setup.run.evaluate(step, student, teacher, micro, clock)
        return not all(np.isfinite(found[name].sum) for name in names if name in found)

    count = batch.mask.shape[0] * batch.mask.shape[1]
    return find_rows(bad, count)
