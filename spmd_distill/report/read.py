"""A run folder as the report needs it: whatever is there, and in words what is not. Reads without jax."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from spmd_distill.errors import UserError
from spmd_distill.metrics.reading import Line, parse_line


@dataclass(frozen=True)
class Checkpoint:
    """One step on disk."""

    step: int
    bytes: int
    """What its files have together."""
    wrong: str | None
    """What its manifest and its files disagree about; None for a step whose files have the sizes they should have."""


@dataclass(frozen=True)
class Run:
    """What is known of a run."""

    name: str
    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    compiled: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """One ``{"step", "prompt", "teacher", "student"}`` a prompt and evaluation, oldest first; a step may be missing."""
    events: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    """What is missing or damaged, in sentences."""
    written: datetime | None = None
    """When the last line of metrics was written."""

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.summary)

    @property
    def last_step(self) -> int:
        """Optimizer steps done, as far as the metrics tell."""
        return max((line.step for line in self.lines), default=0)

    @property
    def seconds(self) -> float:
        """Wall clock of all sessions of the run, up to its last line."""
        return max((line.seconds for line in self.lines), default=0.0)

    @property
    def steps(self) -> int | None:
        """Optimizer steps that the run is to have."""
        found = self.config.get("steps")
        return found if isinstance(found, int) else None

    def marks(self) -> dict[int, tuple[str, bool]]:
        """Steps at which something happened, what, and whether it was no more than going on from a checkpoint."""
        found: dict[int, list[str]] = {}
        loud = set()
        for event in self.events:
            step = event.get("step")
            if isinstance(step, int) and abs(step) < _MOST_STEPS:
                found.setdefault(step, []).append(str(event.get("message") or event.get("guard")))
                loud |= set() if event.get("guard") == "resumed" else {step}
        for line in self.lines:
            if line.split == "train" and line.step not in found:
                odd = [name for name in ("loss", "grad_norm") if not math.isfinite(line.values.get(name, 0.0))]
                said = [f"{name} is {line.values[name]}" for name in odd]
                said += ["skipped"] if line.values.get("skipped") and not odd else []
                if said:
                    found[line.step] = said
                    loud.add(line.step)
        return {step: ("; ".join(said), step not in loud) for step, said in sorted(found.items())}

    def evaluations(self, name: str | None = None) -> list[Line]:
        """Held-out results, of all held-out text or of the set called ``name``."""
        return [line for line in self.lines if line.split == "eval" and set_of(line) == name]

    def sets(self) -> list[str]:
        """Names of held-out sets that were scored by themselves."""
        return list(dict.fromkeys(name for line in self.lines if (name := set_of(line)) is not None))


def set_of(line: Line) -> str | None:
    """The held-out set of an evaluation; None for all of them together."""
    return getattr(line, "set", None)


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read run folders; those of one name get as much of their paths as tells them apart. Raises as `read_run`."""
    runs = [read_run(path) for path in paths]
    whole = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(set(whole)):
            break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def read_run(path: str | Path) -> Run:
    """Read a run folder. What is damaged or missing is named in `Run.trouble`.

    Raises `UserError` for a folder that holds no run.
    """
    path = Path(path)
    try:
        there = path.is_dir() and any((path / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}; expected the folder of a run, such as runs/demo.") from error
    if not there:
        what = "is no folder" if not path.is_dir() else "has neither config.yaml nor metrics.jsonl"
        raise UserError(f"{path}: {what}; expected the folder of a run, such as runs/demo.")
    trouble: list[str] = []
    settings = _yaml(path / "config.yaml", trouble)
    lines = _metrics(path / "metrics.jsonl", trouble)
    samples = _records(path / "samples.jsonl", trouble)
    if not samples:
        last = _json(path / "samples.json", trouble, needed=False, kind=list)
        samples = [sample for sample in last if isinstance(sample, dict)]
    return Run(
        path.resolve().name,
        path,
        settings,
        lines,
        _json(path / "summary.json", trouble, needed=False),
        _json(path / "environment.json", trouble),
        _json(path / "compiled.json", trouble, needed=False),
        samples,
        _records(path / "events.jsonl", trouble),
        _checkpoints(path / "checkpoints", trouble),
        trouble,
        _written(path / "metrics.jsonl"),
    )


def _written(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except (OSError, ValueError, OverflowError):
        return None


def _metrics(path: Path, trouble: list[str]) -> list[Line]:
    """The lines that are whole and make sense."""
    found, bad = [], []
    for number, text in _lines_of(path, trouble):
        try:
            line = parse_line(text)
            if type(line.step) is not int or type(line.seconds) not in (int, float) or line.split not in _SPLITS:
                raise ValueError(f"step {line.step!r}, split {line.split!r} or seconds {line.seconds!r} is none")
            if not math.isfinite(line.seconds) or abs(line.step) > _MOST_STEPS:
                raise ValueError(f"step {line.step} or seconds {line.seconds} is out of range")
            found.append(line)
        except (ValueError, OverflowError, RecursionError) as error:
            bad.append(f"line {number}: {error}")
    if bad:
        count = "1 line is" if len(bad) == 1 else f"{len(bad)} lines are"
        trouble.append(f"metrics.jsonl: {count} no metrics and left out; {'' if len(bad) == 1 else 'first '}{bad[0]}.")
    if not found:
        trouble.append("metrics.jsonl holds no line: nothing was trained or scored yet.")
    return found


_SPLITS = ("train", "eval")
_MOST_STEPS = 10**12


def _lines_of(path: Path, trouble: list[str]) -> list[tuple[int, str]]:
    """Whole lines with their numbers; a last line that a kill cut short is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        trouble.append(f"{path.name} cannot be read: {error.strerror or error}.")
        return []
    whole = text[: text.rfind("\n") + 1]
    return [(number, line) for number, line in enumerate(whole.splitlines(), 1) if line.strip()]


def _records(path: Path, trouble: list[str]) -> list[dict[str, Any]]:
    found, bad = [], []
    for number, line in _lines_of(path, trouble):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            bad.append(number)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        trouble.append(f"{path.name}, line {bad[0]}{more}: no JSON object, and left out.")
    return found


def _json(path: Path, trouble: list[str], needed: bool = True, kind: type = dict) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if needed:
            trouble.append(f"{path.name} is missing.")
        return kind()
    except (OSError, ValueError, RecursionError) as error:
        trouble.append(f"{path.name} cannot be read: {error}.")
        return kind()
    if not isinstance(found, kind):
        trouble.append(f"{path.name} holds something else than expected.")
        return kind()
    return found


def _yaml(path: Path, trouble: list[str]) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        trouble.append(f"{path.name} is missing: the settings of the run are not known.")
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        trouble.append(f"{path.name} cannot be read: {' '.join(str(error).split())}.")
        return {}
    if not isinstance(found, dict):
        trouble.append(f"{path.name} holds no settings.")
        return {}
    return found


def _checkpoints(folder: Path, trouble: list[str]) -> list[Checkpoint]:
    try:
        steps = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    except OSError as error:
        trouble.append(f"checkpoints cannot be read: {error.strerror or error}.")
        return []
    found = [_checkpoint(path) for path in steps if path.name.isascii() and path.name.isdecimal()]
    trouble += [f"checkpoints/{c.step} is damaged: {c.wrong}; a resumed run passes it by." for c in found if c.wrong]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _checkpoint(folder: Path) -> Checkpoint:
    """A step, held against the sizes in its manifest. Its sums are not: that takes as long as reading it all."""
    step, total = int(folder.name), 0
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        wrong = None
        for name, expected in files.items():
            size = (folder / name).stat().st_size if (folder / name).is_file() else None
            total += size or 0
            if size is None:
                wrong = wrong or f"{name} is missing"
            elif size != expected["bytes"]:
                wrong = wrong or f"{name} has {size:,} bytes, expected {expected['bytes']:,}"
        return Checkpoint(step, total, wrong)
    except FileNotFoundError:
        return Checkpoint(step, total, "it has no manifest.json, so it was never finished")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Checkpoint(step, total, "its manifest.json cannot be read")
