"""Rows -> the batches of optimizer step k, as a pure function of k: nothing to save but a number."""

from typing import Any, cast

import grain
import numpy as np

from spmd_distill.data.packing import Rows
from spmd_distill.errors import UserError
from spmd_distill.types import Batch

_FIELDS = ("tokens", "labels", "mask", "positions", "segments")
_PROBE = 8
"""So many of the rows to come are saved with the state."""


class Loader:
    """An endless stream of samples with random access, cut into optimizer steps.

    Sample i of the stream is a row; each run of ``len(rows)`` samples (an epoch) holds every row once, in an
    order of its own. Step k takes samples ``k * A * B`` to ``(k + 1) * A * B``, so a step may hold the end of
    one epoch and the beginning of the next: nothing is dropped, nothing comes twice. Asking for a
    batch changes nothing: any process, at any time, gets the same answer.
    """

    def __init__(self, rows: Rows, batch_rows: int, micro_batches: int, seed: int, shuffle: bool = True):
        """Serve ``rows`` as steps of ``micro_batches`` (A) times ``batch_rows`` (B) rows.

        Args:
            rows: what `pack` returned.
            batch_rows: rows of one micro-batch, over all devices of all hosts together.
            micro_batches: micro-batches whose gradients add up to one optimizer step.
            seed: of the order of the rows, from 0.
            shuffle: False serves every epoch in the order of ``rows``.

        Raises:
            UserError: ``rows`` is empty; ``batch_rows`` or ``micro_batches`` is below 1; ``seed`` is below 0.
        """
        _check_at_least(1, batch_rows=batch_rows, micro_batches=micro_batches)
        _check_at_least(0, seed=seed)
        _check_not_empty(rows)
        self.batch_rows = batch_rows
        self.micro_batches = micro_batches
        self.rows = rows
        self._identity = {
            "rows": len(rows),
            "fingerprint": rows.fingerprint(),
            "seed": seed,
            "shuffle": shuffle,
        }
        self._origin = (0, 0)  # (step, sample) that the stream is counted from
        order = grain.MapDataset.range(len(rows)).seed(seed)
        self._order = (order.shuffle() if shuffle else order).repeat()

    def batch(self, step: int) -> Batch:
        """The batch of optimizer step ``step`` (from 0): numpy arrays of shape ``[A, B, L]``.

        Raises:
            UserError: ``step`` lies before the beginning of the stream.
        """
        index = self._row_numbers(self._first_sample(step), self.micro_batches * self.batch_rows)
        shape = (self.micro_batches, self.batch_rows, -1)
        fields: dict[str, Any] = {name: getattr(self.rows, name)[index].reshape(shape) for name in _FIELDS}
        return Batch(**fields)

    def epoch(self, step: int) -> float:
        """How often the rows have been gone through when step ``step`` begins, such as 1.25."""
        return self._first_sample(step) / len(self.rows)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint taken before step ``step`` has to remember; plain JSON values.

        ``next_sample`` counts samples of the whole run over all hosts, so it means the same on another mesh,
        with another number of processes, and with other batch sizes. ``next_rows`` are the rows to come, to
        notice a shuffle that has changed.
        """
        sample = self._first_sample(step)
        return {"next_sample": sample, "next_rows": self._row_numbers(sample, _PROBE)} | self._identity

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a saved `state` belongs to this very data in this very order.

        Raises:
            UserError: names the first thing that differs, as it was saved and as it is now.
        """
        missing = [key for key in ("next_sample", "next_rows", *self._identity) if key not in state]
        if missing:
            raise UserError(
                f"the saved data state lacks {', '.join(missing)} (found {', '.join(sorted(state))}): "
                "it was not written by this loader. Start a new run."
            )
        data = "give the data that the run was started with"
        fixes = {
            "rows": data,
            "fingerprint": data,
            "seed": "set the data seed back",
            "shuffle": "set the shuffling back",
            "next_rows": "install the version of grain that the run was started with",
        }
        now = self._identity | {"next_rows": self._row_numbers(state["next_sample"], _PROBE)}
        for key, fix in fixes.items():
            if state[key] != now[key]:
                raise UserError(
                    f"the data does not go on where the checkpoint left it: {key} was {state[key]} when it "
                    f"was saved, and is {now[key]} now. Some rows would be repeated and others skipped: "
                    f"{fix}, or start a new run."
                )

    def resume(self, state: dict[str, Any], step: int) -> None:
        """Go on from a saved state: step ``step`` starts with the first sample that was not trained on yet.

        With the batch size of the saved run this changes nothing. With another one (``A * B`` differs) the
        steps from ``step`` on are counted from the saved sample, so still nothing is skipped or repeated.

        Raises:
            UserError: as `check_state`.
        """
        self.check_state(state)
        self._origin = (step, state["next_sample"])

    def _row_numbers(self, first: int, count: int) -> list[int]:
        """The rows behind samples ``first`` to ``first + count`` of the stream."""
        return [int(cast(int, self._order[i])) for i in range(first, first + count)]

    def _first_sample(self, step: int) -> int:
        step0, sample0 = self._origin
        sample = sample0 + (step - step0) * self.micro_batches * self.batch_rows
        if step < 0 or sample < 0:
            raise UserError(f"step {step}: found a step before the first one of this stream, which has sample 0.")
        return sample


def eval_batches(rows: Rows, batch_rows: int) -> list[Batch]:
    """All rows once, in order, as numpy batches ``[B, L]``; the last is filled up with fully masked rows.

    Raises:
        UserError: ``rows`` is empty, or ``batch_rows`` is below 1.
    """
    _check_at_least(1, batch_rows=batch_rows)
    _check_not_empty(rows)
    batches = []
    for first in range(0, len(rows), batch_rows):
        missing = max(0, first + batch_rows - len(rows))
        fields: dict[str, Any] = {
            name: np.pad(getattr(rows, name)[first : first + batch_rows], ((0, missing), (0, 0))) for name in _FIELDS
        }
        batches.append(Batch(**fields))
    return batches


def _check_at_least(least: int, **settings: int) -> None:
    for name, value in settings.items():
        if value < least:
            raise UserError(f"{name}: found {value}, expected an integer of at least {least}.")


def _check_not_empty(rows: Rows) -> None:
    if not rows.valid_tokens:
        raise UserError(
            f"there is nothing to learn in these {len(rows)} row(s): no position has a label. "
            "Expected at least one document of two tokens."
        )
