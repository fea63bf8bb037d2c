"""Runs opened again by ``eval`` and ``export``: what they find is what the run itself had found and written."""

import json

import pytest
from rich.console import Console
from safetensors.numpy import load_file
from tiny import tiny_run

from spmd_distill.cli import main
from spmd_distill.metrics import read_metrics
from spmd_distill.train import distil


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    distil(tiny_run(folder, "--steps", "4", "--eval.every", "2", "--mesh", "single"), console=Console(quiet=True))
    return folder / "run"


def scored(capsys, *arguments: str) -> dict:
    assert main(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("step", [2, 4])
def test_eval_of_a_checkpoint_is_what_the_run_wrote(run, capsys, step):
    (line,) = [m for m in read_metrics(run) if m.split == "eval" and m.step == step]
    found = scored(capsys, str(run), "--step", str(step))
    assert found["step"] == step
    assert {name: found[name] for name in line.values} == line.values


def test_eval_of_the_exported_student_is_that_of_the_run(run, capsys):
    text = run.parent / "text"
    settings = ["--teacher.path", str(run.parent / "teacher"), "--data.train", f"[{text}]", "--data.length", "16"]
    found = scored(capsys, str(run / "student"), "--eval.rows", "8", "--mesh", "single", *settings)
    wanted = scored(capsys, str(run))
    assert {name: found[name] for name in ("kl", "ce_student", "top1")} == pytest.approx(
        {name: wanted[name] for name in ("kl", "ce_student", "top1")}, rel=1e-6
    )


def test_eval_prints_a_table(run, capsys):
    assert main(["eval", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "KL to the teacher" in shown and "before training" in shown and "step 4" in shown


def test_export_writes_what_the_run_exported(run, tmp_path):
    assert main(["export", str(run), str(tmp_path / "last")]) == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "last" / name).read_bytes() == (run / "student" / name).read_bytes()
    assert main(["export", str(run), str(tmp_path / "early"), "--step", "2", "--dtype", "bfloat16"]) == 0
    early, last = (load_file(tmp_path / name / "model.safetensors") for name in ("early", "last"))
    assert early.keys() == last.keys() and {str(x.dtype) for x in early.values()} == {"bfloat16"}
    name = "model.norm.weight"
    assert (early[name].astype("float32") != last[name]).any()


MISTAKES = {
    "no run": (["export", "absent", "out"], "There is no run in absent"),
    "no such step": (["export", "RUN", "out", "--step", "3"], r"checkpoint 3: not in .* it holds steps [2, 4]"),
    "no such step to score": (["eval", "RUN", "--step", "3"], "it holds steps [2, 4]"),
    "a step of a model": (["eval", "RUN/student", "--step", "2"], "is no run folder"),
    "nothing there": (["eval", "absent"], "absent"),
    "a folder in use": (["export", "RUN", "RUN"], "RUN"),
    "a setting that is none": (["eval", "RUN", "--evl.rows", "3"], "Did you mean"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_sentences(run, tmp_path, monkeypatch, capsys, case):
    monkeypatch.chdir(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    arguments, message = MISTAKES[case]
    assert main([a.replace("RUN", str(run)) for a in arguments]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "spmd-distill: error:" in shown and message.split(".*")[-1].replace("RUN", str(run)).strip() in shown
    assert not (tmp_path / "out").exists()
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()} == before
