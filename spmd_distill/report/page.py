"""The page: what is read is put into one HTML file that needs nothing else."""

import shlex
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Any

import yaml
from jinja2 import Environment
from markupsafe import Markup

from spmd_distill.config.source import flatten
from spmd_distill.report.charts import COLOURS, chart
from spmd_distill.report.difference import differences
from spmd_distill.report.panels import SETS, main_panels, other_panels
from spmd_distill.report.read import Run
from spmd_distill.report.tables import cards, costs, results

MARK = '<meta name="generator" content="spmd-distill report">'
"""Stands in every page, so that the command overwrites no other file."""
MOST_EVENTS = 200
MOST_SAMPLES = 6
"""Steps of which a prompt's continuations are shown: the first, the last, and some between."""


def page(runs: Sequence[Run]) -> str:
    """The whole page for one run, or for several side by side."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    files = resources.files("spmd_distill.report")
    template = environment.from_string((files / "page.html").read_text(encoding="utf-8"))
    sets = list(dict.fromkeys(name for run in runs for name in run.sets()))
    charts, other_charts = (
        [Markup(svg) for panel in panels if (svg := chart(panel, runs))]
        for panels in (main_panels(runs), other_panels(runs))
    )
    of_sets = [chart(panel, runs, name) for name in sets for panel in SETS] if len(runs) > 1 else []
    return template.render(
        title=" · ".join(run.name for run in runs),
        mark=Markup(MARK),
        style=Markup((files / "page.css").read_text(encoding="utf-8")),
        script=Markup((files / "page.js").read_text(encoding="utf-8")),
        colours=COLOURS,
        runs=[_facts(run) for run in runs],
        sets=sets,
        charts=charts,
        other_charts=other_charts,
        set_charts=[Markup(svg) for svg in of_sets if svg],
        results=results(runs),
        set_results=[(name, rows) for name in sets if (rows := results(runs, name))],
        costs=costs(runs),
        differences=differences(runs),
    )


def _facts(run: Run) -> dict[str, Any]:
    """What the header, and the sections of each run, say."""
    return {
        "name": run.name,
        "state": _state(run),
        "finished": run.finished,
        "cards": cards(run),
        "subtitle": ", ".join(_put_together(run.summary)),
        "trouble": run.trouble,
        "samples": _samples(run),
        "events": [{**event, "values": _plain(event.get("values") or "")} for event in run.events[-MOST_EVENTS:]],
        "event_counts": Counter(str(event.get("guard", "?")) for event in run.events).most_common(),
        "checkpoints": [(c.step, _bytes(c.bytes), c.wrong) for c in run.checkpoints],
        "environment": [(key, _plain(value)) for key, value in flatten(run.environment).items()],
        "compiled": [(key, _plain(value)) for key, value in flatten(run.compiled).items()],
        "settings": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "",
        "commands": _commands(run),
    }


def _state(run: Run) -> str:
    if run.finished:
        return "finished"
    where = f"at step {run.last_step:,}" + (f" of {run.steps:,}" if run.steps else "")
    return where + (f", last heard of {run.written:%Y-%m-%d %H:%M} UTC" if run.written else "")


def _put_together(summary: dict[str, Any]) -> list[str]:
    """What ran: objective, mesh, mapper and head, as far as the summary knows."""
    objective = summary.get("objective")
    found = [" + ".join(map(str, objective)) if isinstance(objective, list) else objective]
    found += [f"{name} {summary[name]}" for name in ("mesh", "mapper", "head") if summary.get(name)]
    return [str(part) for part in found if part]


def _commands(run: Run) -> list[tuple[str, str]]:
    """What to do next, ready to be copied."""
    folder = shlex.quote(str(run.path))
    found = [
        ("Score the student", f"spmd-distill eval {folder}"),
        ("Write the student", f"spmd-distill export {folder} student"),
        ("The same settings anew", f"spmd-distill train {shlex.quote(str(run.path / 'config.yaml'))} --run OTHER"),
    ]
    if not run.finished:
        return [("Go on", f"spmd-distill train --resume {folder}"), *found]
    student = str(run.path / "student")
    load = [("Load it", f"sd.load_pretrained({student!r})"),
            ("With transformers", f"AutoModelForCausalLM.from_pretrained({student!r})")]  # fmt: skip
    return load + found


def _samples(run: Run) -> list[dict[str, Any]]:
    """For each prompt: what the teacher says, and the student, step by step, the newest first."""
    found: dict[str, dict[str, Any]] = {}
    for sample in run.samples:
        prompt = str(sample.get("prompt", ""))
        entry = found.setdefault(prompt, {"prompt": prompt, "teacher": "", "student": []})
        entry["teacher"] = str(sample.get("teacher") or entry["teacher"])
        if sample.get("student") is not None:
            entry["student"].append((sample.get("step"), str(sample["student"])))
    for entry in found.values():
        said, gaps = entry["student"], MOST_SAMPLES - 1
        kept = range(len(said)) if len(said) <= gaps else {i * (len(said) - 1) // gaps for i in range(gaps + 1)}
        entry["student"] = [_agreeing(said[i][0], said[i][1], entry["teacher"]) for i in sorted(kept, reverse=True)]
    return list(found.values())


def _agreeing(step: Any, text: str, teacher: str) -> tuple[Any, str, str]:
    """A continuation, cut where it leaves the teacher's."""
    same = next(
        (i for i, (a, b) in enumerate(zip(text, teacher, strict=False)) if a != b), min(len(text), len(teacher))
    )
    return step, text[:same], text[same:]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value[:16])) + (f" and {len(value) - 16} more" if len(value) > 16 else "")
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _bytes(count: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
