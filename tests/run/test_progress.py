"""Progress: a live line on a terminal, plain lines elsewhere, and nothing at all where it is not wanted."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from spmd_distill import progress as module
from spmd_distill.progress import TrainProgress


@pytest.fixture(autouse=True)
def now(monkeypatch) -> list[float]:
    """The only clock, which stands still: that of a busy machine jumps."""
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def run(terminal=False, enabled=None, total=40, first=0, stage=None, width=100, **numbers):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width)
    with TrainProgress(total, console, enabled, first_step=first) as progress:
        if stage:
            with progress.stage(stage):
                pass
        for step in range(first + 1, total + 1):
            progress.update(step, numbers)
    return out.getvalue()


NUMBERS = {"loss": 2.34567, "kl": 0.412345, "tokens_per_second": 9876.5}


def test_plain_lines():
    text = run(stage="compiling the [step]", **NUMBERS)
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "compiling the [step] ..."
    assert re.fullmatch(r"compiling the \[step\]: 0\.0 s", lines[1])
    steps = lines[2:]
    assert [line.split()[1] for line in steps] == [f"{n}/40" for n in range(4, 41, 4)]
    pattern = r"step 40/40  loss 2\.346  KL 0\.4123  9\.88k tokens/s  \d:\d\d:\d\d, 0:00:00 left"
    assert re.fullmatch(pattern, steps[-1])


def test_a_slow_run_says_something_every_five_seconds(now):
    out = io.StringIO()
    with TrainProgress(1000, Console(file=out)) as progress:
        for step in range(1, 11):
            now[0] += 100 if step == 1 else 2  # the first one compiles
            progress.update(step)
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/1000", "4/1000", "7/1000", "10/1000"]
    assert lines[0].endswith("0:01:40")  # one step tells no pace
    assert lines[-1].endswith("0:01:58, 0:33:00 left")  # 990 steps of 2 seconds


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_terminal(width):
    text = run(terminal=True, stage="loading [red]", width=width, **NUMBERS)
    assert "\x1b" in text
    assert "loading [red] ..." in text and re.search(r"loading \[red\]: 0\.0 s\n", text)
    if width >= 80:
        plain = re.sub(r"\x1b\[[\d;?]*\w", "", text)
        assert re.search(r"step 40/40 .*loss 2\.346  KL 0\.4123  9\.88k tokens/s  \d:\d\d:\d\d", plain)
    assert text.endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize("terminal", [True, False])
def test_disabled(terminal):
    assert run(terminal=terminal, enabled=False, stage="anything", **NUMBERS) == ""


def test_resumed_run_counts_from_its_step():
    lines = run(first=30, kl=1.0).splitlines()
    assert lines[0].startswith("step 34/40") and "KL 1 " in lines[0]


def test_missing_numbers():
    assert re.fullmatch(r"step 1/1  \d:\d\d:\d\d\n", run(total=1))
    assert "loss nan" in run(total=1, loss=float("nan"))


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_in_a_stage_ends_it(terminal, now):
    out = io.StringIO()
    progress = TrainProgress(10, Console(file=out, force_terminal=terminal))
    with pytest.raises(KeyError), progress, progress.stage("outer"):
        now[0] += 1.5
        with progress.stage("inner"):
            now[0] += 0.3
            raise KeyError("mine")
    assert "inner: stopped after 0.3 s" in out.getvalue()
    assert "outer: stopped after 1.8 s" in out.getvalue()


def test_stage_before_the_bar():
    out = io.StringIO()
    with TrainProgress(10, Console(file=out)).stage("reading"):
        pass
    assert out.getvalue().startswith("reading ...\nreading: 0.0 s")
