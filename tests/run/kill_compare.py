"""Two finished runs of the same settings, compared bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from spmd_distill import metrics

CLOCKED = ("seconds", "peak_rss_gib", *metrics.CLOCKED)
"""What a clock or the machine says, and no two runs share."""


def differences(alone: Path, killed: Path, steps: int, every_eval: int) -> list[str]:
    """What differs between an undisturbed run and another, in sentences; nothing is expected to."""
    wrong = lost_steps(killed, steps, every_eval)
    for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl"):
        one, two = trace(alone / name), trace(killed / name)
        wrong += [f"{name}, line {i}: {a} and {b}" for i, (a, b) in enumerate(zip(one, two, strict=False), 1) if a != b]
        wrong += [f"{name}: {len(one)} and {len(two)} lines"] * (len(one) != len(two))
    one, two = arrays(alone, steps), arrays(killed, steps)
    wrong += [f"checkpoint {steps}: arrays {sorted(one.keys() ^ two.keys())}"] * (one.keys() != two.keys())
    for name in one.keys() & two.keys():
        if one[name].dtype != two[name].dtype or one[name].tobytes() != two[name].tobytes():
            wrong.append(f"checkpoint {steps}: {name} differs by {np.abs(one[name] - two[name]).max()}")
    for read in (meta, results, files):
        one, two = read(alone, steps), read(killed, steps)
        wrong += [f"{read.__name__}: {k}: {one.get(k)} and {two.get(k)}" for k in one | two if one.get(k) != two.get(k)]
    return wrong


def lost_steps(run: Path, steps: int, every_eval: int) -> list[str]:
    """Steps and evaluations of which ``metrics.jsonl`` has none, or more than one, or one in the wrong place."""
    wanted = {"train": [*range(1, steps + 1)], "eval": sorted({*range(0, steps, every_eval), steps})}
    found = {
        split: [line["step"] for line in trace(run / "metrics.jsonl") if line["split"] == split] for split in wanted
    }
    return [f"{split} steps in metrics.jsonl: {found[split]}" for split in wanted if found[split] != wanted[split]]


def trace(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines, if any, without what a clock says, and without events that a resumed run took back."""
    found = list[dict[str, Any]]()
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        if line.get("guard") == "resumed":
            found = [event for event in found if event["step"] <= line["step"]]
        else:
            found.append(_without_clocks(line))
    return found


def arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by its path: step, parameters, moments, seed."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        tree = reader.restore(run / "checkpoints" / str(step) / "state")
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def meta(run: Path, step: int) -> dict[str, Any]:
    """What lies beside the arrays: the data's place, tokens seen, the best step, guards; but not where the run is."""
    found = json.loads((run / "checkpoints" / str(step) / "meta" / "metadata").read_text())
    return found | {"settings": found["settings"] | {"run": ""}}


def results(run: Path, step: int) -> dict[str, Any]:
    """``summary.json`` without clocks, and the samples."""
    return _without_clocks(json.loads((run / "summary.json").read_text())) | {
        "samples": json.loads((run / "samples.json").read_text())
    }


def files(run: Path, step: int) -> dict[str, Any]:
    """What lies in the folder, and the bytes of the student."""
    there = {path.name: "there" for path in run.iterdir() if path.name != "resumed.jsonl"}
    steps = sorted(path.name for path in (run / "checkpoints").iterdir())
    return there | {"checkpoints": steps} | {f"student/{p.name}": p.read_bytes() for p in (run / "student").iterdir()}


def sums(run: Path) -> str:
    """What was compared, counted."""
    lines = trace(run / "metrics.jsonl")
    step = max(line["step"] for line in lines)
    found = arrays(run, step)
    parts = {
        name: [x for path, x in found.items() if path.startswith(f"['{name}']")] for name in ("params", "opt_state")
    }
    counts = ", ".join(f"{len(xs)} of {name} ({sum(x.size for x in xs):,} numbers)" for name, xs in parts.items())
    seed = next(int(x) for path, x in found.items() if "seed" in path)
    return (
        f"{len(found)} arrays, {counts}, seed {seed} of the random numbers; {sum(len(line) - 2 for line in lines):,} "
        f"values of {len(lines)} steps and evaluations; {sum(1 for name in files(run, step) if '/' in name)} files of "
        f"the student"
    )


def _without_clocks(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in CLOCKED}
