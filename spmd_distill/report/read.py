"""A run folder as the report needs it: whatever is there, and in words what is not. Reads without jax."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from spmd_distill.errors import UserError
from spmd_distill.metrics.reading import Line, parse_line


@dataclass(frozen=True)
class Checkpoint:
    """One finished step on disk."""

    step: int
    bytes: int


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

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.summary)

    @property
    def last_step(self) -> int:
        """Optimizer steps done, as far as the metrics tell."""
        return max((line.step for line in self.lines), default=0)

    @property
    def steps(self) -> int | None:
        """Optimizer steps that the run is to have."""
        found = self.config.get("steps")
        return found if isinstance(found, int) else None

    def evaluations(self, name: str | None = None) -> list[Line]:
        """Held-out results, of all held-out text or of the set called ``name``."""
        return [line for line in self.lines if line.split == "eval" and set_of(line) == name]

    def sets(self) -> list[str]:
        """Names of held-out sets that were scored by themselves."""
        return list(dict.fromkeys(name for line in self.lines if (name := set_of(line)) is not None))

    def result(self, metric: str, which: int) -> float | None:
        """A metric of the first (0) or the last (-1) evaluation."""
        found = self.evaluations()
        return found[which].values.get(metric) if found else None


def set_of(line: Line) -> str | None:
    """The held-out set of an evaluation; None for all of them together."""
    return getattr(line, "set", None)


def read_run(path: str | Path) -> Run:
    """Read a run folder. What is damaged or missing is named in `Run.trouble`.

    Raises `UserError` for a folder that holds no run.
    """
    path = Path(path)
    if not (path / "config.yaml").is_file() and not (path / "metrics.jsonl").is_file():
        what = "is no folder" if not path.is_dir() else "has neither config.yaml nor metrics.jsonl"
        raise UserError(f"{path}: {what}; expected the folder of a run, such as runs/demo.")
    trouble: list[str] = []
    lines = []
    for number, text in _lines_of(path / "metrics.jsonl", trouble):
        try:
            lines.append(parse_line(text))
        except ValueError as error:
            trouble.append(f"metrics.jsonl, line {number}: {error}. The line is left out.")
    environment = _json(path / "environment.json", trouble)
    summary = _json(path / "summary.json", trouble, needed=False)
    samples = _records(path / "samples.jsonl", trouble)
    if not samples:
        last = _json(path / "samples.json", trouble, needed=False, kind=list)
        samples = [sample for sample in last if isinstance(sample, dict)]
    if not lines:
        trouble.append("metrics.jsonl holds no line: nothing was trained or scored yet.")
    return Run(
        path.resolve().name,
        path,
        _yaml(path / "config.yaml", trouble),
        lines,
        summary,
        environment,
        _json(path / "compiled.json", trouble, needed=False),
        samples,
        _records(path / "events.jsonl", trouble),
        _checkpoints(path / "checkpoints", trouble),
        trouble,
    )


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
    found = []
    for number, line in _lines_of(path, trouble):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            trouble.append(f"{path.name}, line {number}: is no JSON object. The line is left out.")
    return found


def _json(path: Path, trouble: list[str], needed: bool = True, kind: type = dict) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if needed:
            trouble.append(f"{path.name} is missing.")
        return kind()
    except (OSError, ValueError) as error:
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
    except (OSError, ValueError, yaml.YAMLError) as error:
        trouble.append(f"{path.name} cannot be read: {' '.join(str(error).split())}.")
        return {}
    if not isinstance(found, dict):
        trouble.append(f"{path.name} holds no settings.")
        return {}
    return found


def _checkpoints(folder: Path, trouble: list[str]) -> list[Checkpoint]:
    found = []
    for step in sorted(folder.iterdir(), key=lambda p: p.name) if folder.is_dir() else []:
        if not step.is_dir() or not step.name.isdecimal():
            continue
        try:
            files = json.loads((step / "manifest.json").read_text())["files"]
            found.append(Checkpoint(int(step.name), sum(file["bytes"] for file in files.values())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            trouble.append(f"checkpoints/{step.name} has no readable manifest.json: it cannot be resumed from.")
    return sorted(found, key=lambda checkpoint: checkpoint.step)
