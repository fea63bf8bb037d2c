"""What may change between two sessions of a run and what may not, what is known again, and which checkpoints stay."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from tiny import tiny_run

from spmd_distill.checkpoint import Checkpoints, read_mark, steps_there
from spmd_distill.cli import main
from spmd_distill.config import CheckpointConfig, parse_config, to_dict
from spmd_distill.errors import UserError
from spmd_distill.metrics import read_metrics
from spmd_distill.resuming import changes
from spmd_distill.saving import Saver

STEPS = 4
FLAGS = (
    "--steps", str(STEPS), "--mesh", "single", "--eval.every", "1", "--eval.prompts", "[]", "--data.micro_batches", "1",
    "--optimizer.schedule", "constant", "--optimizer.learning_rate", "0.03",
    # begins as the teacher and learns from the text alone: it moves away with every step, so the first is the best
    "--student.layers", "[0,1,2,3]", "--objective.alpha", "0",
    "--checkpoint.every", "1", "--checkpoint.keep", "1", "--checkpoint.keep_every", "3", "--checkpoint.best", "kl",
)  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A folder with a teacher, text, a run file, and the run of it, started by ``train RUN.yaml --resume``."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "run.yaml").write_text(yaml.safe_dump(to_dict(tiny_run(folder, *FLAGS))))
    assert main(["train", str(folder / "run.yaml"), "--resume"]) == 0
    return folder


@pytest.fixture
def copy(original, tmp_path) -> Path:
    """The same folder at another place, which is no other run: paths are compared by what lies there."""
    shutil.copytree(original, tmp_path / "copy")
    text = (original / "run.yaml").read_text().replace(str(original), str(tmp_path / "copy"))
    (tmp_path / "copy" / "run.yaml").write_text(text)
    return tmp_path / "copy"


def trains(folder: Path, *flags: str) -> int:
    return main(["train", str(folder / "run.yaml"), "--resume", *flags])


def tree(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def evaluated(run: Path) -> dict[int, float]:
    return {line.step: line.values["kl"] for line in read_metrics(run) if line.split == "eval"}


def went_on(run: Path) -> list[dict]:
    path = run / "resumed.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_best_the_last_and_every_so_many_stay(original):
    run = original / "run"
    found = evaluated(run)
    best = min((step for step in found if step), key=found.__getitem__)
    assert best == 1, "its settings let the student move away from the teacher"
    assert steps_there(run / "checkpoints") == sorted({best, 3, STEPS})
    assert read_mark(run / "checkpoints", best) == ("kl", found[best])
    assert read_mark(run / "checkpoints", STEPS) is None
    assert not went_on(run), "nothing was there to go on with"


def test_another_place_a_longer_run_and_other_checkpoints_are_the_same_run(original, copy):
    flags = ("--steps", "6", "--checkpoint.keep", "2", "--checkpoint.keep_every", "null", "--checkpoint.export", "best")
    assert trains(copy, *flags, "--data.cache", str(copy / "other"), "--data.prefetch", "0") == 0
    run, found = copy / "run", evaluated(copy / "run")
    assert [line for line in read_metrics(run) if line.step <= STEPS] == read_metrics(original / "run")
    assert [line.step for line in read_metrics(run) if line.split == "train"] == [1, 2, 3, 4, 5, 6]
    best = min((step for step in found if step), key=found.__getitem__)
    assert steps_there(run / "checkpoints") == sorted({best, 5, 6})
    (session,) = went_on(run)
    assert session["step"] == STEPS and session["changes"]["steps"] == [STEPS, 6]
    assert parse_config(path=run / "config.yaml").steps == 6
    with Checkpoints(run / "checkpoints", best="kl", read_only=True) as checkpoints:
        assert checkpoints.best == best
    assert json.loads((run / "summary.json").read_text())["exported_step"] == best


def test_another_training_is_refused_and_shown(copy, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    before = tree(copy)
    assert trains(copy, "--optimizer.learning_rate", "0.01", "--eval.every", "2", "--head.chunk", "8") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Settings that differ from the run's" in said
    for row in ("rate │ 0.03 │ 0.01 │ another training", "every │ 1 │ 2 │ none on the training", "8 │ to rounding"):
        assert row in said
    mistake = said.partition("spmd-distill: error: ")[2]
    assert "optimizer.learning_rate: 0.03 -> 0.01" in mistake and "--allow-changes" in mistake
    assert "eval.every" not in mistake and "head.chunk" not in mistake
    assert tree(copy) == before


def test_another_training_goes_on_where_it_is_allowed(original, copy, capsys):
    assert trains(copy, "--optimizer.learning_rate", "0.01", "--steps", "5", "--allow-changes") == 0
    assert "another training" in capsys.readouterr().err
    lines = read_metrics(copy / "run")
    assert [line for line in lines if line.step <= STEPS] == read_metrics(original / "run")
    assert [line.values["learning_rate"] for line in lines if line.split == "train"][-2:] == pytest.approx([0.03, 0.01])
    (session,) = went_on(copy / "run")
    assert session["changes"]["optimizer.learning_rate"] == [0.03, 0.01]
    assert trains(copy, "--optimizer.learning_rate", "0.01", "--steps", "5") == 0, "it is a setting of the run now"


def test_a_run_that_is_longer_than_wanted(copy, capsys):
    before = tree(copy / "run" / "checkpoints")
    assert trains(copy, "--steps", "3") == 2
    assert f"stands at step {STEPS}, beyond steps: 3" in capsys.readouterr().err
    assert tree(copy / "run" / "checkpoints") == before


def change_weights(folder: Path) -> None:
    file = folder / "teacher" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"] + np.float32(1e-3)
    save_file(weights, file, {"format": "pt"})


def change_text(folder: Path) -> None:
    with (folder / "text" / "00.txt").open("a") as file:
        file.write("and more\n")


def change_tokenizer(folder: Path) -> None:
    file = folder / "teacher" / "tokenizer.json"
    found = json.loads(file.read_text())
    vocab = found["model"]["vocab"]
    vocab["t"], vocab["q"] = vocab["q"], vocab["t"]
    file.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_text, "the data does not go on where the checkpoint left it"),
        (change_tokenizer, "the data does not go on where the checkpoint left it: tokenizer was"),
        (change_weights, "had another teacher than"),
    ],
)
def test_what_it_was_trained_on_is_known_again(copy, capsys, change, said):
    change(copy)
    before = tree(copy / "run" / "checkpoints"), (copy / "run" / "metrics.jsonl").read_bytes()
    assert trains(copy, "--steps", "5") == 2
    found = capsys.readouterr().err
    assert said in found and "Traceback" not in found
    assert (tree(copy / "run" / "checkpoints"), (copy / "run" / "metrics.jsonl").read_bytes()) == before


def test_another_teacher_is_accepted_where_it_is_allowed(copy, capsys):
    change_weights(copy)
    assert trains(copy, "--steps", "5", "--allow-changes") == 0
    assert "model.safetensors was" in capsys.readouterr().err
    assert evaluated(copy / "run").keys() == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("flags", "effect"),
    [
        (("--data.cache", "null", "--data.workers", "2", "--data.prefetch", "0"), "exact"),
        (("--eval.every", "7", "--checkpoint.every", "9", "--checkpoint.keep_every", "9"), "exact"),
        (("--logging.every", "5", "--logging.wandb.project", "mine", "--eval.samples", "false"), "exact"),
        (("--guards.memory", "0.5", "--guards.clip", "false", "--guards.device_memory_gib", "9"), "exact"),
        (("--teacher.path", "elsewhere", "--data.train", "[elsewhere]"), "content"),
        (("--mesh", "dp8", "--mapper", "pmap", "--head.kind", "reference", "--student.remat", "full"), "rounding"),
        (("--seed", "1", "--data.rows", "8", "--student.dropout", "0.2", "--eval.rows", "9"), "another"),
        (("--optimizer.b1", "0.5", "--objective.divergence", "reverse_kl", "--data.seed", "3"), "another"),
    ],
)
def test_what_a_changed_setting_does_to_a_run(tmp_path, flags, effect):
    old, new = tiny_run(tmp_path), tiny_run(tmp_path, *flags)
    found = {change.name: change.effect for change in changes(to_dict(old), new)}
    assert found and set(found.values()) == {effect}, found
    assert {name.removeprefix("--") for name in flags[::2]} <= {*found, "data.train", "objective.divergence"}


@pytest.mark.parametrize(("schedule", "effect"), [("constant", "exact"), ("cosine", "another")])
def test_a_longer_run_is_the_same_one_where_its_learning_rates_are(tmp_path, schedule, effect):
    old, new = (tiny_run(tmp_path, "--optimizer.schedule", schedule, "--steps", steps) for steps in ("6", "9"))
    ((name, *_, found),) = changes(to_dict(old), new)
    assert (name, found) == ("steps", effect)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--checkpoint.keep_every", "3"), "checkpoint.every, 2, is no divisor"),
        (("--checkpoint.keep_every", "0"), "at least 1"),
        (("--checkpoint.export", "best"), "set checkpoint.best"),
        (("--checkpoint.best", "accuracy"), "checkpoint.best"),
    ],
)
def test_checkpoints_that_cannot_be_kept(tmp_path, flags, said):
    with pytest.raises(UserError, match=said):
        tiny_run(tmp_path, *flags)


def test_a_metric_that_the_objective_does_not_measure():
    saver = SimpleNamespace(wanted=CheckpointConfig(best="kl"))
    with pytest.raises(UserError, match=r"checkpoint\.best is kl, which .* does not measure; it measures loss, sorted"):
        Saver.check_metric(saver, {"loss": 1.0, "sorted_logit_uld": 1.0})
