"""Kill a run again and again, go on with it each time: ``python tests/run/kill_run.py --kills 20 --steps 60``.

Each kill is a SIGKILL at a moment of its own: while the process starts, compiles, restores, trains or evaluates, while
a checkpoint is written, between its manifest and its rename, while older ones are deleted, while the student is
exported. `spmd-distill train RUN.yaml --resume` must go on from the newest checkpoint that was committed, and the run
must end with the bits of one that nobody disturbed: every array of the last checkpoint, every value of every step and
evaluation, every byte of the student. The exit code is 1 where anything differs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from kill_compare import differences, sums

EVERY, EVERY_EVAL = 5, 6
HELD = """
import sys, time
from spmd_distill.checkpoint import manifest
from spmd_distill.cli import main
from spmd_distill.metrics import MetricWriter
moment, first = sys.argv[1], int(sys.argv[2])
write_manifest, write = manifest.write_manifest, MetricWriter.write

def pause(now, step):
    time.sleep(600 if now == moment and step >= first else 0)

def held_write_manifest(folder):
    pause("save", int(folder.name.split(".")[0]))
    write_manifest(folder)
    pause("commit", int(folder.name.split(".")[0]))

def held_write(self, step, values, split):
    write(self, step, values, split)
    pause(split, step)

manifest.write_manifest, MetricWriter.write = held_write_manifest, held_write
sys.exit(main(sys.argv[3:]))
"""
"""The command, with a pause at a moment ("train", "save", "commit") of a step or a later one. A checkpoint has its
manifest and not yet its name for a millisecond, without it."""


@dataclass(frozen=True)
class Kill:
    """What a process is killed at, the first time that it comes at ``step`` or later, and how long after that.

    ``held``: it waits there to be killed, so that no machine is too busy to meet the moment.
    """

    moment: str
    step: int
    delay: float = 0.0
    held: bool = False


class Session:
    """A process that trains, as it is seen from outside."""

    def __init__(self, settings: Path, run: Path, kill: Kill | None):
        """Start it, to be killed like this."""
        self.run, self.log = run, settings.with_suffix(".log")
        self.committed_before = self.committed()
        self.kill_at = 0 if kill is None else max(kill.step, self.committed_before + 1)
        held = kill is not None and (kill.held or kill.moment == "commit")
        program = ["-c", HELD, kill.moment, str(self.kill_at)] if held else ["-m", "spmd_distill"]
        self.fresh = not (run / "config.yaml").exists()
        self._resumed_before = len(json_lines(run / "resumed.jsonl"))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "train", settings, "--resume"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def committed(self) -> int:
        """The newest committed step; 0: none."""
        found = [path.parent.name for path in self.run.glob("checkpoints/*/manifest.json")]
        return max((int(name) for name in found if name.isdecimal()), default=0)

    def saving(self) -> int:
        """The step whose checkpoint is being written; 0: none."""
        found = self.run.glob("checkpoints/*.orbax-checkpoint-tmp*")
        return max((int(path.name.split(".")[0]) for path in found), default=0)

    def has_manifest(self) -> bool:
        """Whether the one that is being written has its manifest already."""
        return any(self.run.glob("checkpoints/*.orbax-checkpoint-tmp*/manifest.json"))

    def went_on_at(self) -> int | None:
        """The step at which this session went on; None: it is new, or not so far."""
        found = json_lines(self.run / "resumed.jsonl")[self._resumed_before :]
        return found[0]["step"] if found else None

    def trained(self) -> int:
        """The newest step that this session may have trained; 0: none yet."""
        if not self.fresh and self.went_on_at() is None:
            return 0
        found = json_lines(self.run / "metrics.jsonl")
        return max((line["step"] for line in found if line["split"] == "train"), default=0)

    def said(self) -> list[str]:
        """The lines of its log."""
        return self.log.read_text(errors="replace").splitlines() or [""]

    def is_at(self, stage: str) -> bool:
        """Whether the last thing it said is that this stage has begun."""
        return self.said()[-1].startswith(stage) and self.said()[-1].endswith(" ...")

    def evaluating(self) -> int:
        """The step at which it evaluates just now; 0: it does something else."""
        return int(self.said()[-1].split()[3]) if self.is_at("evaluating at step") else 0


MOMENTS: dict[str, tuple[float, Callable[[Session, int], bool]]] = {
    "train": (0.05, lambda session, step: session.trained() >= step),
    "start": (4.0, lambda session, step: True),
    "save": (0.05, lambda session, step: session.saving() >= step),
    "restore": (0.2, lambda session, step: session.is_at("restoring")),
    "commit": (0.0, lambda session, step: session.saving() >= step and session.has_manifest()),
    "compile": (3.0, lambda session, step: session.is_at("compiling")),
    "evaluate": (0.01, lambda session, step: session.evaluating() >= step),
    "delete": (0.005, lambda session, step: session.committed() >= step),
    "export": (0.3, lambda session, step: session.is_at("exporting")),
}
"""Name -> at most so many seconds after it; whether it has come, at this step or later."""


def plan(count: int, steps: int, seed: int) -> list[Kill]:
    """So many kills, each moment about as often as the others, spread over the run; the export comes last."""
    pick, last = random.Random(seed), max(1, count // 10)
    names = [name for name in MOMENTS if name != "export"]
    moments = [names[i % len(names)] for i in range(count - last)]
    pick.shuffle(moments)
    at = sorted(pick.randrange(1, steps * 4 // 5) for _ in range(count))
    return [Kill(m, s, pick.uniform(0, MOMENTS[m][0])) for m, s in zip([*moments, *["export"] * last], at, strict=True)]


def disturb(settings: Path, run: Path, kills: Sequence[Kill], tell: Callable[..., None]) -> list[str]:
    """Do the run, killed like this; what was wrong on the way. ``tell`` gets the cells of a row for each session."""
    wrong = []
    for number, kill in enumerate([*kills, None], 1):
        if kill is not None and kill.moment == "restore" and not any(run.glob("checkpoints/*/manifest.json")):
            kill = replace(kill, moment="compile")  # there is nothing to restore yet
        session = Session(settings, run, kill)
        code = _end(session, kill)
        log, at, before = "\n".join(session.said()), session.went_on_at(), session.committed_before
        if code != (0 if kill is None else -signal.SIGKILL):
            wrong.append(f"session {number} ended with code {code}, killed at {kill}: {log[-2000:]}")
            return wrong
        if "Traceback" in log or "error" in log or "damaged" in log:
            wrong.append(f"session {number} said {log[-2000:]}")
        if at is not None and at != before:
            wrong.append(f"session {number} went on at step {at}; step {before} was committed")
        wrong += [f"after kill {number}, step {step}: {why}" for step, why in unverified(run)]
        how = "new" if session.fresh else "killed before" if at is None else f"went on at step {at}"
        left = f"step {session.saving()}{', manifest written' * session.has_manifest()}" if session.saving() else ""
        what = [kill.moment, session.said()[-1].split("  ")[0]] if kill else ["", "done"]
        tell(str(number), how, *what, str(session.trained()), str(session.committed()), left)
    return wrong


def _end(session: Session, kill: Kill | None) -> int:
    """Wait for the moment and kill; the exit code."""
    deadline = time.monotonic() + 900
    if kill is not None:
        while session.process.poll() is None and not MOMENTS[kill.moment][1](session, session.kill_at):
            time.sleep(0.001)
            if time.monotonic() > deadline:
                break
        time.sleep(kill.delay)
        session.process.kill()
    try:
        return session.process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        session.process.kill()


def unverified(run: Path) -> list[tuple[int, str]]:
    """Committed steps that are not what their manifest says."""
    from spmd_distill.checkpoint import finished_steps, verify_step

    found = [(step, verify_step(run / "checkpoints" / str(step))) for step in finished_steps(run / "checkpoints")]
    return [(step, why) for step, why in found if why is not None]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; none where there is no file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def settings(folder: Path, name: str, steps: int, *flags: str) -> tuple[Path, Path]:
    """A run file of the tiny run, and its run folder; runs of several names share teacher and text."""
    from tiny import tiny_run

    from spmd_distill.config import to_dict

    run, at = folder / name / "run", folder / f"{name}.yaml"
    every = ["--steps", str(steps), "--checkpoint.every", str(EVERY), "--eval.every", str(EVERY_EVAL)]
    config = replace(tiny_run(folder, *every, "--checkpoint.best", "kl", *flags), run=str(run))
    at.write_text(yaml.safe_dump(to_dict(config)))
    return at, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", default="dp2_tp4")
    options = parser.parse_args()
    from rich.console import Console
    from rich.table import Table

    from spmd_distill.runtime import prepare_jax

    prepare_jax(fast_compile=True)
    console, began = Console(width=120), time.monotonic()
    table = Table("#", "the session", "killed in", "its last words", "trained", "committed", "half-written")

    def tell(*cells: str) -> None:
        table.add_row(*cells)
        print(f"{time.monotonic() - began:6.0f} s  session", *cells, sep="  ", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as name:
        alone, killed = (settings(Path(name), n, options.steps, "--mesh", options.mesh) for n in ("alone", "killed"))
        wrong = disturb(*alone, [], lambda *cells: None)
        wrong += disturb(*killed, plan(options.kills, options.steps, options.seed), tell)
        wrong += wrong or differences(alone[1], killed[1], options.steps, EVERY_EVAL)
        console.print(table)
        if not wrong:
            console.print(f"{options.kills} kills, no difference: {sums(alone[1])}")
    console.print(f"{time.monotonic() - began:.0f} s, seed {options.seed}")
    console.print("\n".join(wrong), markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
