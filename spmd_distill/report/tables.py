"""Results and costs of runs as rows of tables, and as the figures of the header."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any, TypeGuard

from spmd_distill.metrics.table import perplexity
from spmd_distill.report.read import Run
from spmd_distill.report.series import number

ABSENT = "-"
Show = Callable[[float], str]
_LESS, _MORE = -1, 1


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _perplexity(value: float) -> str:
    found = perplexity(value)
    return f"{found:,.2f}" if found < 1e5 else number(found)


RESULTS: tuple[tuple[str, str, Show, int], ...] = (  # title, metric, how it is shown, which way is better
    ("KL to the teacher (nats/token)", "kl", "{:.4f}".format, _LESS),
    ("Reverse KL (nats/token)", "kl_reverse", "{:.4f}".format, _LESS),
    ("Cross entropy (nats/token)", "ce_student", "{:.4f}".format, _LESS),
    ("Perplexity", "ce_student", _perplexity, _LESS),
    ("Perplexity of the teacher", "ce_teacher", _perplexity, 0),
    ("Top-1 agreement", "top1", _percent, _MORE),
    ("Acceptance rate", "acceptance", _percent, _MORE),
)


@dataclass(frozen=True)
class Cell:
    """A metric of a run."""

    before: str
    after: str
    best: bool


@dataclass(frozen=True)
class Row:
    """A metric of all runs."""

    title: str
    cells: list[Cell]


def results(runs: Sequence[Run], of_set: str | None = None) -> list[Row]:
    """A row a metric: at the first and the last evaluation of each run, the best marked where there are several."""
    found = [run.evaluations(of_set) for run in runs]
    rows = []
    for title, metric, show, better in RESULTS:
        pairs = [(x[0].values.get(metric), x[-1].values.get(metric)) if x else (None, None) for x in found]
        last = [after for _, after in pairs if after is not None and math.isfinite(after)]
        if all(after is None for _, after in pairs):
            continue
        best = max(last, key=lambda x: better * x) if better and len(last) > 1 else None
        rows.append(Row(title, [Cell(_or(a, show), _or(b, show), best is not None and b == best) for a, b in pairs]))
    return rows


def costs(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """What the runs took, a row a figure; rows that no run knows are left out."""

    def of(key: str, show: Show) -> Callable[[Run], str]:
        return lambda run: _or(run.summary.get(key), show)

    rows: tuple[tuple[str, Callable[[Run], str]], ...] = (
        ("Steps", lambda run: f"{run.last_step:,}" + (f" of {run.steps:,}" if run.steps else "")),
        ("Tokens", lambda run: _or(_last(run, "tokens"), "{:,.0f}".format)),
        ("Time", lambda run: span(run.seconds)),
        ("Tokens per second, overall", of("tokens_per_second", "{:,.0f}".format)),
        ("Tokens per second, median of steps", lambda run: _or(_median(run, "tokens_per_second"), "{:,.0f}".format)),
        ("Use of the devices' peak, median", lambda run: _or(_median(run, "mfu"), _percent)),
        ("Waiting for data, median", lambda run: _or(_median(run, "data_wait"), _percent)),
        ("Parameters of the student", of("student_parameters", "{:,.0f}".format)),
        ("Parameters of the teacher", of("teacher_parameters", "{:,.0f}".format)),
        ("Peak memory of the process", of("peak_rss_gib", "{:.1f} GiB".format)),
        ("Steps clipped", lambda run: _counted(run, "clipped")),
        ("Steps skipped", lambda run: _counted(run, "skipped")),
    )
    shown = [(title, [of_run(run) for run in runs]) for title, of_run in rows]
    return [(title, cells) for title, cells in shown if any(cell != ABSENT for cell in cells)]


def cards(run: Run) -> list[tuple[str, str, str]]:
    """(title, number, remark) of the header of one run."""
    found = []
    evaluations = run.evaluations()
    shown: tuple[tuple[str, str, Show], ...] = (
        ("KL to the teacher", "kl", "{:.3f}".format),
        ("Perplexity", "ce_student", lambda x: number(perplexity(x))),
        ("Top-1 agreement", "top1", _percent),
        ("Acceptance rate", "acceptance", _percent),
    )
    for title, metric, show in shown:
        first, last = (x.values.get(metric) for x in (evaluations[0], evaluations[-1])) if evaluations else (None, None)
        teacher = evaluations[-1].values.get("ce_teacher") if evaluations and metric == "ce_student" else None
        if first is not None and last is not None:
            beside = "" if teacher is None else f", teacher {number(perplexity(teacher))}"
            begin = f"from {show(first)}" if len(evaluations) > 1 else f"at step {evaluations[0].step:,}"
            found.append((title, show(last), begin + beside))
    tokens, rate = _last(run, "tokens"), _median(run, "tokens_per_second")
    if tokens is not None:
        remark = f"in {span(run.seconds)}" + ("" if rate is None else f", {number(rate)} a second")
        found.append(("Tokens trained on", number(tokens), remark))
    ours, theirs = run.summary.get("student_parameters"), run.summary.get("teacher_parameters")
    if _is_number(ours) and _is_number(theirs) and theirs:
        found.append(("Parameters", number(ours), f"{ours / theirs:.0%} of the teacher's {number(theirs)}"))
    return found


def span(seconds: float) -> str:
    """A time as hours, minutes and seconds."""
    return str(timedelta(seconds=round(min(seconds, 8e13))))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _or(value: Any, show: Show) -> str:
    return show(value) if isinstance(value, (int, float)) else ABSENT


def _of_training(run: Run, metric: str) -> list[float]:
    return [line.values[metric] for line in run.lines if line.split == "train" and metric in line.values]


def _last(run: Run, metric: str) -> float | None:
    found = _of_training(run, metric)
    return found[-1] if found else None


def _median(run: Run, metric: str) -> float | None:
    found = [value for value in _of_training(run, metric) if math.isfinite(value)]
    return median(found) if found else None


def _counted(run: Run, metric: str) -> str:
    found = [value for value in _of_training(run, metric) if math.isfinite(value)]
    return f"{sum(found):,.0f} of {len(found):,}" if found else ABSENT
