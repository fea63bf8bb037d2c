"""A run that is killed three times, as ``kill_run.py`` does it twenty times, and proof that it would notice a loss."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from kill_compare import differences, sums
from kill_run import EVERY_EVAL, MOMENTS, Kill, disturb, plan, settings

STEPS = 12
KILLS = tuple(Kill(moment, step, held=True) for moment, step in (("train", 7), ("save", 8), ("commit", 8)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path, list[tuple[str, ...]]]:
    """A run that was left alone, the same one killed, and what was told of the sessions of that."""
    folder, rows = tmp_path_factory.mktemp("runs"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))  # five processes, one compilation
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        files = [settings(folder, name, STEPS, "--mesh", "single", "--eval.prompts", "[]") for name in ("one", "two")]
        assert disturb(*files[0], [], lambda *cells: None) == []
        assert disturb(*files[1], KILLS, lambda *cells: rows.append(cells)) == []
    return files[0][1], files[1][1], rows


def test_nothing_is_lost(runs):
    alone, killed, rows = runs
    assert differences(alone, killed, STEPS, EVERY_EVAL) == []
    assert [row[2] for row in rows] == ["train", "save", "commit", ""]
    assert rows[0][1] == "new" and {row[1].rpartition(" ")[0] for row in rows[1:]} == {"went on at step"}
    went_on = [json.loads(line)["step"] for line in (killed / "resumed.jsonl").read_text().splitlines()]
    assert went_on == [int(row[5]) for row in rows[:-1]], "each session goes on from what the one before committed"
    assert rows[2][6].endswith("manifest written")
    assert "11 of params" in sums(killed)


def change_a_value(run: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"top1": 0.', '"top1": 1.', 1))


def repeat_a_step(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:5], lines[4], *lines[5:]]))


def lose_an_evaluation(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 6, "split": "eval"' not in line))


def take_older_arrays(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / str(STEPS) / "state")
    shutil.copytree(run / "checkpoints" / "10" / "state", run / "checkpoints" / str(STEPS) / "state")


def forget_tokens(run: Path) -> None:
    path = run / "checkpoints" / str(STEPS) / "meta" / "metadata"
    path.write_text(path.read_text().replace('"tokens": ', '"tokens": 1'))


def cut_the_student(run: Path) -> None:
    (run / "student" / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_a_value, "metrics.jsonl, line 1: "),
        (repeat_a_step, "train steps in metrics.jsonl: [1, 2, 3, 4, 4, 5"),
        (lose_an_evaluation, "eval steps in metrics.jsonl: [0, 12]"),
        (take_older_arrays, "checkpoint 12: ['opt_state']"),
        (forget_tokens, "meta: tokens: "),
        (cut_the_student, "files: student/model.safetensors: "),
    ],
)
def test_a_loss_would_be_noticed(runs, tmp_path, change, said):
    alone, killed, _ = runs
    shutil.copytree(killed, tmp_path / "run")
    change(tmp_path / "run")
    assert any(sentence.startswith(said) for sentence in differences(alone, tmp_path / "run", STEPS, EVERY_EVAL))


@pytest.mark.parametrize("seed", range(5))
def test_twenty_kills_meet_every_moment(seed):
    kills = plan(20, 60, seed)
    assert kills == plan(20, 60, seed) and len(kills) == 20
    assert {kill.moment for kill in kills} == set(MOMENTS)
    assert all(a.step <= b.step <= 48 for a, b in itertools.pairwise(kills))
    assert [kill.moment for kill in kills[-2:]] == ["export"] * 2
