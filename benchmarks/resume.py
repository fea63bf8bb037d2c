"""From the start of a process to its first training step done: a new run beside one that goes on.

``python benchmarks/resume.py [RUN.yaml] [--pairs 5] [--json PATH]`` takes the demo's run file where none is given. A
run is stopped after two steps by SIGTERM, which saves it. Then, in turn, again and again, a new run starts in an empty
folder, and a copy of that one goes on (``spmd-distill train RUN.yaml --resume``); each is killed once ``metrics.jsonl``
has its first new step. Both tokenise nothing (the tokens are cached by then) and compile everything. The first pair is
thrown away. Figures are medians, of wall clock and of CPU seconds of all threads; the bar is on the ratio of the first.
The exit code is 1 if it is missed.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _report import OURS, Row, report

NAME = "resume"
BAR = 1.5
"""Seconds to the first step of a run that goes on, over those of a new one."""
LIMIT = 1800.0
"""Seconds after which a process counts as stuck."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", nargs="?", metavar="RUN.yaml")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", metavar="PATH", help="also as JSON; - is stdout")
    options = parser.parse_args()
    if options.run_file is None:
        from spmd_distill.runtime import run_files_folder

        options.run_file = str(run_files_folder() / "cpu.yaml")
    found: dict[str, list[tuple[float, float]]] = {"new": [], "goes on": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stop_after(2, options.run_file, folder / "saved")
        for number in range(options.pairs + 1):
            for kind, times in found.items():
                run = folder / "run"
                if kind == "goes on":
                    shutil.copytree(folder / "saved", run)
                times.append(first_step(options.run_file, run))
                shutil.rmtree(run)
            told = ", ".join(f"{kind} {times[-1][0]:.1f} s" for kind, times in found.items())
            print(f"pair {number} of {options.pairs}: {told}", file=sys.stderr, flush=True)
    setting = {"run file": Path(options.run_file).name, "pairs": options.pairs}
    rows, medians = [], {}
    for index, metric in enumerate(("to the first step", "CPU time to the first step")):
        for kind, times in found.items():
            medians[kind] = statistics.median(pair[index] for pair in times[1:])
            rows.append(Row(NAME, OURS, setting | {"run": kind}, metric, medians[kind], "s"))
        ratio, what = medians["goes on"] / medians["new"], f"{metric}, over that of a new run"
        if index == 0:
            rows.append(Row.at_most(NAME, OURS, setting | {"run": "goes on"}, what, ratio, "x", BAR))
        else:
            rows.append(Row(NAME, OURS, setting | {"run": "goes on"}, what, ratio, "x"))
    raise SystemExit(not report(rows, options.json, "A new run, and one that goes on"))


def start(run_file: str, run: Path, log: Any) -> subprocess.Popen[bytes]:
    """A process that starts the run, or goes on with it where it is there."""
    command = [sys.executable, "-m", "spmd_distill", "train", run_file, "--resume", "--run", str(run)]
    command += ["--checkpoint.every", "1000", "--data.cache", str(run.parent / "tokens")]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def stop_after(steps: int, run_file: str, run: Path) -> None:
    """Begin a run and have it stopped and saved after so many steps, or a few more."""
    with (run.parent / "log").open("w+b") as log:
        process = start(run_file, run, log)
        try:
            wait_for(process, run, steps, log)
            process.send_signal(signal.SIGTERM)
            if process.wait(timeout=LIMIT) != 0:
                raise SystemExit(f"the run could not be stopped and saved: {said(log)}")
        finally:
            process.kill()


def first_step(run_file: str, run: Path) -> tuple[float, float]:
    """Seconds of wall clock and of CPU from the start of a process until its first step is done; it is then killed."""
    before, spent = trained(run), os.times()
    with (run.parent / "log").open("w+b") as log:
        began = time.monotonic()
        process = start(run_file, run, log)
        try:
            wait_for(process, run, before + 1, log)
            took = time.monotonic() - began
        finally:
            process.kill()
            process.wait()
    after = os.times()  # with those of children that were waited for
    cpu = after.children_user - spent.children_user + after.children_system - spent.children_system
    return took, cpu


def wait_for(process: subprocess.Popen[bytes], run: Path, step: int, log: Any) -> None:
    """Wait until a step is in ``metrics.jsonl``."""
    until = time.monotonic() + LIMIT
    while trained(run) < step:
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"step {step} was not reached: {said(log)}")
        time.sleep(0.01)


def trained(run: Path) -> int:
    """The last training step in ``metrics.jsonl``; 0: none."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return max((line["step"] for line in found if line["split"] == "train"), default=0)


def said(log: Any) -> str:
    """The end of what a process has said."""
    log.seek(0)
    return log.read().decode(errors="replace")[-2000:]


if __name__ == "__main__":
    main()
