"""The page: what is read is put into one HTML file that needs nothing else."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from importlib import resources
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from spmd_distill.metrics.table import perplexity
from spmd_distill.report.charts import COLOURS, PANELS, chart, number, points, thinned
from spmd_distill.report.difference import differences
from spmd_distill.report.read import Run

_LESS, _MORE = -1, 1
RESULTS = (  # title, metric, how it is shown, which way is better
    ("KL to the teacher (nats/token)", "kl", lambda x: f"{x:.4f}", _LESS),
    ("Reverse KL (nats/token)", "kl_reverse", lambda x: f"{x:.4f}", _LESS),
    ("Cross entropy (nats/token)", "ce_student", lambda x: f"{x:.4f}", _LESS),
    ("Perplexity", "ce_student", lambda x: number(perplexity(x)), _LESS),
    ("Perplexity of the teacher", "ce_teacher", lambda x: number(perplexity(x)), 0),
    ("Top-1 agreement", "top1", lambda x: f"{100 * x:.1f} %", _MORE),
    ("Acceptance rate", "acceptance", lambda x: f"{100 * x:.1f} %", _MORE),
)
MOST_EVENTS = 200


def page(runs: Sequence[Run]) -> str:
    """The whole page for one run, or for several side by side."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    files = resources.files("spmd_distill.report")
    template = environment.from_string((files / "page.html").read_text(encoding="utf-8"))
    return template.render(
        title=" · ".join(run.name for run in runs),
        style=Markup((files / "page.css").read_text(encoding="utf-8")),
        script=Markup((files / "page.js").read_text(encoding="utf-8")),
        data=Markup(_data(runs)),
        colours=COLOURS,
        runs=[_facts(run) for run in runs],
        charts=[Markup(svg) for panel in PANELS if (svg := chart(panel, runs)) is not None],
        set_charts=_set_charts(runs),
        results=_results(runs),
        set_results=_set_results(runs),
        figures=_figures(runs),
        differences=differences(runs),
    )


def _facts(run: Run) -> dict[str, Any]:
    """What the header, and the sections of each run, say."""
    kl = run.result("kl", 0), run.result("kl", -1)
    state = "finished" if run.finished else f"at step {run.last_step:,} of {run.steps:,}" if run.steps else "unfinished"
    folder = shlex.quote(str(run.path))
    commands = [
        ("Write the student", f"spmd-distill export {folder} student"),
        ("Score it", f"spmd-distill eval {folder}"),
    ]
    if not run.finished:
        commands.insert(0, ("Go on", f"spmd-distill train --resume {folder}"))
    else:
        commands.append(("Load it", f'AutoModelForCausalLM.from_pretrained("{run.path / "student"}")'))
    return {
        "name": run.name,
        "state": state,
        "finished": run.finished,
        "kl": None if None in kl else tuple(f"{x:.3f}" for x in kl),
        "cards": _cards(run),
        "subtitle": ", ".join(_put_together(run.summary)),
        "trouble": run.trouble,
        "samples": _samples(run),
        "events": [{**event, "values": _values(event.get("values"))} for event in run.events[-MOST_EVENTS:]],
        "events_left_out": max(len(run.events) - MOST_EVENTS, 0),
        "event_counts": Counter(str(event.get("guard", "?")) for event in run.events).most_common(),
        "checkpoints": [(c.step, _bytes(c.bytes)) for c in run.checkpoints],
        "environment": [(key, _plain(value)) for key, value in {**run.environment, **run.compiled}.items()],
        "commands": commands,
    }


def _put_together(summary: dict[str, Any]) -> list[str]:
    """What ran: objective, mesh, mapper and head, as far as the summary knows."""
    objective = summary.get("objective")
    found = [" + ".join(map(str, objective)) if isinstance(objective, list) else objective]
    found += [f"{name} {summary[name]}" for name in ("mesh", "mapper", "head") if summary.get(name)]
    return [str(part) for part in found if part]


def _cards(run: Run) -> list[tuple[str, str, str]]:
    """(title, number, remark) of the header."""
    found = []
    for title, metric, show in (
        ("KL to the teacher", "kl", lambda x: f"{x:.3f}"),
        ("Perplexity", "ce_student", lambda x: number(perplexity(x))),
        ("Top-1 agreement", "top1", lambda x: f"{100 * x:.1f} %"),
        ("Acceptance rate", "acceptance", lambda x: f"{100 * x:.1f} %"),
    ):
        first, last = run.result(metric, 0), run.result(metric, -1)
        if first is not None and last is not None:
            teacher = run.result("ce_teacher", -1)
            beside = (
                f", teacher {number(perplexity(teacher))}" if metric == "ce_student" and teacher is not None else ""
            )
            found.append((title, show(last), f"from {show(first)}{beside}"))
    return found


def _results(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return _rows(runs, lambda run, metric: (run.result(metric, 0), run.result(metric, -1)))


def _rows(runs: Sequence[Run], of: Any) -> list[dict[str, Any]]:
    """A row a metric: before and after in each run, the best marked where there are several."""
    rows = []
    for title, metric, show, better in RESULTS:
        pairs = [of(run, metric) for run in runs]
        last = [after for _, after in pairs if after is not None and math.isfinite(after)]
        if not any(after is not None for _, after in pairs):
            continue
        best = max(last, key=lambda x: better * x) if better and len(runs) > 1 and last else None
        cells = [
            {
                "before": "-" if before is None else show(before),
                "after": "-" if after is None else show(after),
                "best": best is not None and after == best,
            }
            for before, after in pairs
        ]
        rows.append({"title": title, "cells": cells})
    return rows


def _set_results(runs: Sequence[Run]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The same for every held-out set by itself."""
    found = []
    for name in dict.fromkeys(name for run in runs for name in run.sets()):

        def of(run: Run, metric: str, name: str = name) -> tuple[float | None, float | None]:
            lines = run.evaluations(name)
            return (lines[0].values.get(metric), lines[-1].values.get(metric)) if lines else (None, None)

        found.append((name, _rows(runs, of)))
    return found


def _set_charts(runs: Sequence[Run]) -> list[Any]:
    names = dict.fromkeys(name for run in runs for name in run.sets())
    return [Markup(svg) for name in names if (svg := chart(PANELS[0], runs, name)) is not None]


def _figures(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """What the runs took."""
    rows = (
        ("Steps", lambda run: f"{run.last_step:,}"),
        ("Tokens", lambda run: _last(run, "tokens", lambda x: f"{x:,.0f}")),
        ("Tokens per second", lambda run: _or_dash(run.summary.get("tokens_per_second"), lambda x: f"{x:,.0f}")),
        ("Time", lambda run: str(timedelta(seconds=round(max((x.seconds for x in run.lines), default=0))))),
        ("Parameters of the student", lambda run: _or_dash(run.summary.get("student_parameters"), number)),
        ("Parameters of the teacher", lambda run: _or_dash(run.summary.get("teacher_parameters"), number)),
        ("Peak memory of the process", lambda run: _or_dash(run.summary.get("peak_rss_gib"), lambda x: f"{x:.1f} GiB")),
        ("Steps clipped", lambda run: _counted(run, "clipped")),
        ("Steps skipped", lambda run: _counted(run, "skipped")),
    )
    shown = [(title, [of(run) for run in runs]) for title, of in rows]
    return [(title, cells) for title, cells in shown if any(cell != "-" for cell in cells)]


def _last(run: Run, metric: str, show: Any) -> str:
    found = [line.values[metric] for line in run.lines if metric in line.values]
    return show(found[-1]) if found else "-"


def _counted(run: Run, metric: str) -> str:
    found = [line.values[metric] for line in run.lines if line.split == "train" and metric in line.values]
    return f"{sum(found):,.0f} of {len(found):,}" if found else "-"


def _or_dash(value: Any, show: Any) -> str:
    return show(value) if isinstance(value, (int, float)) else "-"


def _samples(run: Run) -> list[dict[str, Any]]:
    """For each prompt: what the teacher says, and the student, step by step."""
    found: dict[str, dict[str, Any]] = {}
    for sample in run.samples:
        prompt = str(sample.get("prompt", ""))
        entry = found.setdefault(prompt, {"prompt": prompt, "teacher": "", "student": []})
        entry["teacher"] = str(sample.get("teacher") or entry["teacher"])
        if sample.get("student") is not None:
            entry["student"].append((sample.get("step", "end"), str(sample["student"])))
    for entry in found.values():
        said = entry["student"]
        entry["student"] = [said[i] for i in sorted({0, len(said) // 2, len(said) - 1})] if said else []
    return list(found.values())


def _data(runs: Sequence[Run]) -> str:
    """What the page's script shows when the mouse points at a curve; JSON that cannot end its element."""
    series = {
        panel.metric: [
            {split: [[x, float(f"{y:.5g}")] for x, y in thinned(points(run, split, panel.metric, panel.factor))]
             for split in ("train", "eval")}
            for run in runs
        ]
        for panel in PANELS
    }  # fmt: skip
    found = {"runs": [run.name for run in runs], "series": series}
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


def _values(values: Any) -> str:
    if not isinstance(values, dict):
        return ""
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value[:16])) + (f" and {len(value) - 16} more" if len(value) > 16 else "")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
