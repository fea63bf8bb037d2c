"""A whole run folder, and whether the run can go on: what ``train --resume`` would meet, without starting it."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_distill.checkpoint import read_meta
from spmd_distill.config import RunConfig
from spmd_distill.doctor.finding import Finding, guarded
from spmd_distill.doctor.results import check_files, check_student, finished
from spmd_distill.doctor.settings import check_settings, read_settings
from spmd_distill.doctor.sources import check_models, check_text
from spmd_distill.doctor.steps import Steps, check_steps
from spmd_distill.doctor.traces import check_metrics, check_records
from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer
from spmd_distill.runfolder import RunFolder

Say = Callable[[str], None]
RECORDS = ("events.jsonl", "samples.jsonl", "resumed.jsonl")


@dataclass(frozen=True)
class RunReport:
    """What is known of a run folder."""

    path: Path
    findings: tuple[Finding, ...]
    resumable: bool
    """Whether ``train --resume`` goes on with it. False for one that is being trained, and for one that is finished."""
    step: int | None
    """The step it would go on from: of the newest good checkpoint, or 0."""
    command: str | None
    """What goes on with it; None where nothing does."""
    sentence: str
    """What the findings come to."""


def check_run(path: str | os.PathLike[str], say: Say = lambda message: None) -> RunReport:
    """Check all of a run folder and change nothing in it.

    Args:
        path: the folder.
        say: is told what takes long: hashing checkpoints and reading the text.

    Raises:
        UserError: ``path`` is no folder.
    """
    folder = RunFolder(path)
    if not folder.path.is_dir():
        found = "a file" if folder.path.exists() else "nothing there"
        raise UserError(f"run folder {folder.path}: found {found}, expected the folder of a run; check the path")
    alive = folder.in_use()
    findings: list[Finding] = []
    if alive:
        findings.append(Finding("note", folder.path.name, "a process is training in it just now.", "Let it."))
    config, finding = read_settings(folder)
    findings.append(finding)
    steps = _steps(folder, alive, say, findings)
    meta = {} if steps.newest is None else read_meta(folder.checkpoints, steps.newest) or {}
    done = finished(folder)
    if config is not None:
        findings += guarded("config.yaml", lambda: check_settings(config, folder.path, steps.newest, meta))
    every = 1 if config is None else config.logging.every
    newest = steps.newest
    findings += guarded("metrics.jsonl", lambda: check_metrics(folder.metrics, newest, every, alive))
    for name in RECORDS:
        findings += guarded(name, lambda name=name: check_records(folder.path / name, alive), blocks=False)
    findings += guarded("run folder", lambda: check_files(folder), blocks=False)
    if done or folder.student.exists():
        findings += guarded("student", lambda: check_student(folder), blocks=False)
    if config is not None:
        findings += _sources(config, folder.path, meta, say)
    return RunReport(folder.path, tuple(findings), **_verdict(folder, config, steps, findings, alive, done))


def _steps(folder: RunFolder, alive: bool, say: Say, findings: list[Finding]) -> Steps:
    found = Steps()

    def check() -> Iterator[Finding]:
        nonlocal found
        found = check_steps(folder.checkpoints, alive, say)
        yield from found.findings

    findings += guarded("checkpoints", check)
    return found


def _sources(config: RunConfig, folder: Path, meta: Mapping[str, Any], say: Say) -> list[Finding]:
    tokenizer: TextTokenizer | None = None

    def models() -> list[Finding]:
        nonlocal tokenizer
        tokenizer, found = check_models(config, folder, meta)
        return found

    say("reading the teacher's files")
    findings = guarded("teacher.path", models)
    say("reading the text")
    return findings + guarded("data", lambda: check_text(config, tokenizer, meta))


def _verdict(
    folder: RunFolder, config: RunConfig | None, steps: Steps, findings: list[Finding], alive: bool, done: bool
) -> dict[str, Any]:
    """The rest of a report: the sentence, and how the run goes on."""
    where, step = shown(folder.path), steps.newest or 0
    command = f"spmd-distill train --resume {shlex.quote(where)}"
    blocked = next((finding for finding in findings if finding.blocks), None)
    of = "" if config is None else f" of {config.steps}"
    if alive:
        sentence = f"{where} is being trained, and has saved step {step}{of}: there is nothing to resume."
        return {"resumable": False, "step": step, "command": None, "sentence": sentence}
    if blocked is not None:
        sentence = f"{where} cannot be resumed: {blocked.about} {_joined(blocked.found)} {blocked.fix}".rstrip()
        return {"resumable": False, "step": None, "command": None, "sentence": sentence}
    whole = config is not None and step >= config.steps
    if done and whole:
        sentence = f"{where} is finished, with all {step} steps: there is nothing to resume."
        return {"resumable": False, "step": step, "command": None, "sentence": sentence}
    if whole:
        sentence = f"{where} is trained, and its student is exported by: {command}"
    elif steps.newest is None:
        sentence = f"{where} has no checkpoint, and begins again at step 0 with: {command}"
    else:
        sentence = f"{where} can be resumed from step {step}{of} with: {command}"
    return {"resumable": True, "step": step, "command": command, "sentence": sentence}


def _joined(found: str) -> str:
    return found if found.endswith((".", "?")) else f"{found}."


def shown(path: Path) -> str:
    """A path as short as it can be given to a command here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
