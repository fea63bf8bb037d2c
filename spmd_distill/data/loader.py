"""Rows -> the batches of optimizer step k, as a pure function of k: nothing to save but a number."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd_distill.data.rows import FIELDS, AbstractRows, Order
from spmd_distill.errors import UserError
from spmd_distill.types import Batch

_PROBE = 8
"""So many of the rows to come are saved with the state."""
_ALWAYS = ("rows", "fingerprint", "seed", "shuffle")
"""Parts of an identity that rows of every kind have."""
_DATA = "give the data that the run was started with"
_FIXES = {
    "rows": _DATA,
    "fingerprint": _DATA,
    "text": _DATA,
    "sources": _DATA,
    "tokenizer": "give the teacher that the run was started with",
    "seed": "set the data seed back",
    "shuffle": "set the shuffling back",
    "next_rows": "install the version of grain that the run was started with",
}


class Loader:
    """An endless stream of samples with random access, cut into optimizer steps.

    Sample i of the stream is a row; each run of ``len(rows)`` samples (an epoch) holds every row once, in
    an order of its own; a `Mixture` with weights has epochs for each source by itself (see `Order`). Step k takes
    samples ``k * A * B`` to ``(k + 1) * A * B``, so a step may hold the end of one epoch and the beginning of the next:
    nothing is dropped, nothing comes twice. Asking for a batch changes nothing: any process, at any time, gets the
    same answer, and each host of a run asks for its own rows of it.
    """

    def __init__(self, rows: AbstractRows, batch_rows: int, micro_batches: int, seed: int, shuffle: bool = True):
        """Serve ``rows`` as steps of ``micro_batches`` (A) times ``batch_rows`` (B) rows.

        Args:
            rows: what `pack` returned, `PackedRows`, or a `Mixture` of several.
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
        self.identity: dict[str, Any] = {**rows.identity(), "seed": seed, "shuffle": shuffle}
        """What decides the stream, as plain values: two loaders of one identity serve the same."""
        self._origin = (0, 0)  # (step, sample) that the stream is counted from
        self._order = Order(rows.sizes, rows.weights, seed, shuffle)

    def batch(self, step: int) -> Batch:
        """The batch of optimizer step ``step`` (from 0): numpy arrays of shape ``[A, B, L]``.

        Raises:
            UserError: ``step`` lies before the beginning of the stream.
        """
        return self.local(step, range(self.batch_rows))

    def local(self, step: int, rows: Sequence[int] | slice) -> Batch:
        """Some rows of each micro-batch of ``batch(step)``: numpy arrays of shape ``[A, len(rows), L]``.

        Only these rows are put together, so that a host of several pays for what its own devices hold.

        Args:
            step: the optimizer step, from 0.
            rows: numbers in ``range(B)``, in the order wanted, or a slice of them.

        Raises:
            UserError: ``step`` lies before the beginning of the stream, or a row is not in ``range(B)``.
        """
        wanted = np.arange(self.batch_rows)[rows] if isinstance(rows, slice) else np.asarray(rows, np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < self.batch_rows:
            raise UserError(
                f"rows of a batch: found {wanted.min()} to {wanted.max()}, expected 0 to {self.batch_rows - 1}."
            )
        numbers = np.array(self._order.rows(self._first_sample(step), self.micro_batches * self.batch_rows))
        taken = self.rows.take(numbers.reshape(self.micro_batches, -1)[:, wanted].reshape(-1).tolist())
        shape = (self.micro_batches, len(wanted), self.rows.length)
        fields: dict[str, Any] = {name: getattr(taken, name).reshape(shape) for name in FIELDS}
        return Batch(**fields)

    def samples(self, step: int) -> list[tuple[int, int]]:
        """Each row of a step's batch, in its order: its sample's number in the stream, and its row's in the data."""
        first, count = self._first_sample(step), self.micro_batches * self.batch_rows
        return list(zip(range(first, first + count), self._order.rows(first, count), strict=True))

    def epoch(self, step: int) -> float:
        """How often the rows have been gone through when step ``step`` begins, such as 1.25: samples over rows."""
        return self._first_sample(step) / len(self.rows)

    def epochs(self, step: int) -> list[float]:
        """The same for each source of a `Mixture` by itself, in its order."""
        return self._order.epochs(self._first_sample(step))

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint taken before step ``step`` has to remember; plain JSON values.

        ``next_sample`` counts samples of the whole run over all hosts, so it means the same on another mesh,
        with another number of processes, and with other batch sizes. ``next_rows`` are the rows to come, to
        notice a shuffle that has changed.
        """
        sample = self._first_sample(step)
        return {"next_sample": sample, "next_rows": self._order.rows(sample, _PROBE)} | self.identity

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a saved `state` belongs to this very data in this very order.

        Raises:
            UserError: names the first thing that differs, as it was saved and as it is now.
        """
        missing = [key for key in ("next_sample", "next_rows", *_ALWAYS) if key not in state]
        if missing:
            raise UserError(
                f"the saved data state lacks {', '.join(missing)} (found {', '.join(sorted(state))}): "
                "it was not written by this loader. Start a new run."
            )
        now = self.identity | {"next_rows": self._order.rows(state["next_sample"], _PROBE)}
        ignored = ("next_sample", "next_rows", *_ALWAYS)
        details = [key for key in {**now, **state} if key not in ignored]  # first, as they say most
        for key in (*details, *_ALWAYS, "next_rows"):
            then, this = state.get(key), now.get(key)
            if then != this:
                fix = _FIXES.get(key, f"set {key} back" if "." not in key else _FIXES["fingerprint"])
                raise UserError(
                    f"the data does not go on where the checkpoint left it: {key} was {then} when it "
                    f"was saved, and is {this} now. Some rows would be repeated and others skipped: "
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

    def _first_sample(self, step: int) -> int:
        step0, sample0 = self._origin
        sample = sample0 + (step - step0) * self.micro_batches * self.batch_rows
        if step < 0 or sample < 0:
            raise UserError(f"step {step}: found a step before the first one of this stream, which has sample 0.")
        return sample


def eval_batches(rows: AbstractRows, batch_rows: int) -> list[Batch]:
    """All rows once, in order, as numpy batches ``[B, L]``; the last is filled up with fully masked rows.

    Raises:
        UserError: ``rows`` is empty, or ``batch_rows`` is below 1.
    """
    _check_at_least(1, batch_rows=batch_rows)
    _check_not_empty(rows)
    batches = []
    for first in range(0, len(rows), batch_rows):
        last = min(first + batch_rows, len(rows))
        taken, missing = rows.take(range(first, last)), first + batch_rows - last
        fields: dict[str, Any] = {name: np.pad(getattr(taken, name), ((0, missing), (0, 0))) for name in FIELDS}
        batches.append(Batch(**fields))
    return batches


def _check_at_least(least: int, **settings: int) -> None:
    for name, value in settings.items():
        if value < least:
            raise UserError(f"{name}: found {value}, expected an integer of at least {least}.")


def _check_not_empty(rows: AbstractRows) -> None:
    if not rows.valid_tokens:
        raise UserError(
            f"there is nothing to learn in these {len(rows)} row(s): no position has a label. "
            "Expected at least one document of two tokens."
        )
