"""What is not finite is never learnt: skipped steps are counted, several in a row end the run, a bad teacher does."""

import math
from collections.abc import Callable, Sequence

from spmd_distill.config import GuardsConfig
from spmd_distill.errors import UserError
from spmd_distill.guards.events import Events
from spmd_distill.optimizer import OF_THE_TEACHER

FindRows = Callable[[Sequence[str]], str]
"""Names of metrics -> the rows of the step's batch on which one of them is not finite, in words; "" for no row. Without
names: all rows."""


class FiniteGuard:
    """Tells a teacher that is not finite from a student that is not. The update itself was skipped in the program."""

    name, teacher = "skipped", "teacher"

    def __init__(self, config: GuardsConfig, events: Events, dynamic_scale: bool = False):
        """Judge as ``config`` says. With a dynamic loss scale an overflow of the gradient is how it finds its size."""
        self._config, self._events = config, events
        self._watched = ("loss",) if dynamic_scale else ("loss", "grad_norm")
        self.in_row = 0
        """Steps in a row whose loss or gradient was not finite; a checkpoint keeps it."""

    def measure(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """The metrics ``skipped`` (0 or 1) and ``skipped_total`` of a step."""
        if values["skipped"]:
            self._events.count(self.name)
        return {f"{self.name}_total": self._events.totals.get(self.name, 0)}

    def check(self, step: int, values: dict[str, float], find: FindRows) -> None:
        """Judge a step whose metrics are ``values``.

        Raises:
            UserError: the teacher is not finite on a valid token, or this is the last of so many steps in a row whose
                loss or gradient is not finite. It names the step and the rows.
        """
        if self._config.teacher and (bad := _not_finite(values, OF_THE_TEACHER)):
            self._stop_for_teacher(step, bad, find(OF_THE_TEACHER) or find(()))
        if self._config.nonfinite_in_row is None:
            return
        bad = _not_finite(values, self._watched)
        self.in_row = self.in_row + 1 if bad else 0
        if not bad:
            return
        what = ", ".join(f"{name} is {value}" for name, value in bad.items())
        rows = find(())
        message = f"{what}: skipped, {self.in_row} in a row; the batch was {rows}"
        self._events.add(step, self.name, message, {**bad, "in_row": self.in_row}, counts=False)
        if self.in_row >= self._config.nonfinite_in_row:
            found = find(("loss",))
            where = f"The loss is not finite on {found}" if found else f"The last batch was {rows}"
            raise UserError(
                f"Step {step}: {what}, for the {_ordinal(self.in_row)} step in a row, so the run stops here; these "
                f"steps changed nothing. {where}. A lower optimizer.learning_rate, more optimizer.warmup_steps or "
                f"precision.compute float32 usually mends it; go on from the last checkpoint with --resume. "
                f"guards.nonfinite_in_row sets how many are borne."
            )

    def _stop_for_teacher(self, step: int, bad: dict[str, float], rows: str) -> None:
        what = ", ".join(f"{name} is {value}" for name, value in bad.items())
        self._events.add(step, self.teacher, f"the teacher is not finite ({what}) on {rows}", bad)
        raise UserError(
            f"Step {step}: the teacher's log-probabilities are not finite ({what}) on {rows}, so the run stops before "
            f"the student learns them. Check the teacher's weights, take precision.teacher and precision.compute "
            f"float32, or leave these rows out; then go on with --resume. guards.teacher: false turns this off."
        )


def find_rows(is_bad: Callable[[list[int]], bool], count: int) -> list[int]:
    """Which of ``count`` rows are bad, by halving: ``is_bad(rows)`` says whether any of these is.

    Takes about ``2 log2(count)`` questions for each bad row.
    """

    def among(rows: list[int]) -> list[int]:
        if not rows or not is_bad(rows):
            return []
        if len(rows) == 1:
            return rows
        middle = len(rows) // 2
        return among(rows[:middle]) + among(rows[middle:])

    return among(list(range(count)))


def name_rows(samples: Sequence[tuple[int, int]], most: int = 16) -> str:
    """Rows in words, from their numbers in the stream of samples and in the training data."""
    shown = ", ".join(str(row) for _, row in samples[:most])
    more = f" and {len(samples) - most} more" if len(samples) > most else ""
    numbers = [sample for sample, _ in samples]
    whole = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    stream = f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers[:most])) + more
    return f"rows {shown}{more} of the training data (samples {stream} of the run)"


def _not_finite(values: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: values[name] for name in names if name in values and not math.isfinite(values[name])}


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
