"""Held-out results before and after training, as a table for people."""

import math
from collections.abc import Iterable, Mapping

from rich.table import Table


def perplexity(cross_entropy: float) -> float:
    """``exp`` of a cross entropy in nats a token; infinite where that overflows."""
    return math.inf if cross_entropy > 700 else math.exp(cross_entropy)


def results_table(before: Mapping[str, float], after: Mapping[str, float], terms: Iterable[str] = ()) -> Table:
    """The held-out metrics of the student before and after training, side by side; see `comparison_table`."""
    return comparison_table({"before": before, "after": after}, terms=terms)


def comparison_table(
    columns: Mapping[str, Mapping[str, float]], title: str = "Held-out results", terms: Iterable[str] = ()
) -> Table:
    """Held-out metrics side by side.

    Args:
        columns: metrics by the names above, by the name of their column. A missing one shows as a dash; no row where
            all lack it.
        title: what stands above.
        terms: names of more metrics to show, those of losses inside the network.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    found = list(columns.values())
    teachers = [m["ce_teacher"] for m in reversed(found) if "ce_teacher" in m]
    beside = f" (teacher {perplexity(teachers[0]):.2f})" if teachers else ""
    rows = [
        ("KL to the teacher (nats/token)", "kl", lambda x: f"{x:.4f}"),
        ("cross entropy (nats/token)", "ce_student", lambda x: f"{x:.4f}"),
        (f"perplexity{beside}", "ce_student", lambda x: f"{perplexity(x):.2f}"),
        ("top-1 agreement with the teacher", "top1", lambda x: f"{100 * x:.1f} %"),
        ("acceptance rate", "acceptance", lambda x: f"{100 * x:.1f} %"),
    ]
    rows += [(term, term, lambda x: f"{x:.4g}") for term in terms]
    for title, key, show in rows:
        if any(key in m for m in found):
            table.add_row(title, *(show(m[key]) if key in m else "-" for m in found))
    return table
