"""Whole runs on a tiny teacher: the run folder, resuming bit for bit, other meshes and mappers, every bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console
from tiny import tiny_run, train_until_first_checkpoint

from spmd_distill.cli import main
from spmd_distill.config import parse_config, to_dict
from spmd_distill.errors import UserError
from spmd_distill.guards import Interrupted
from spmd_distill.interop import open_huggingface, tokenizer_from_folder
from spmd_distill.loop import Loop
from spmd_distill.metrics import CLOCKED, read_metrics
from spmd_distill.train import distil

AGREEMENT = [f"{name}_{when}" for name in ("kl", "top1", "acceptance", "student_ppl") for when in ("before", "after")]
SUMMARY = ["mesh", "mapper", "head", "teacher_ppl", *AGREEMENT, "steps", "tokens", "seconds", "tokens_per_second"]
SUMMARY.append("peak_rss_gib")
QUIET = Console(quiet=True)


def trace(folder: Path) -> list[tuple]:
    """What was trained and evaluated, without what a clock says."""
    return [(m.step, m.split, {k: v for k, v in m.values.items() if k not in CLOCKED}) for m in read_metrics(folder)]


def final_state(folder: Path, step: int = 6):
    """Every array of a checkpoint, on the host."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        return jax.tree.leaves(reader.restore(folder / "checkpoints" / str(step) / "state"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict]:
    """One run that was never disturbed."""
    folder = tmp_path_factory.mktemp("finished")
    summary = distil(tiny_run(folder), console=QUIET)
    return folder, summary


def test_a_run_leaves_everything_behind(finished):
    folder, summary = finished
    run = folder / "run"
    assert json.loads((run / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert set(SUMMARY) <= set(summary)
    assert (summary["mesh"], summary["mapper"], summary["head"], summary["steps"]) == (
        "dp2_tp4",
        "shard_map",
        "fused",
        6,
    )
    assert summary["kl_after"] < summary["kl_before"]
    assert parse_config(path=run / "config.yaml") == tiny_run(folder)
    lines = read_metrics(run)
    assert [m.step for m in lines if m.split == "train"] == [1, 2, 3, 4, 5, 6]
    assert [m.step for m in lines if m.split == "eval"] == [0, 3, 6]
    for name in ("loss", "kl", "ce_student", "ce_teacher", "top1", "acceptance"):
        assert all(name in m.values for m in lines)
    assert summary["tokens"] == [m for m in lines if m.split == "train"][-1].values["tokens"]
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events.*"))
    assert sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()) == [2, 4, 6]
    assert {s["prompt"] for s in json.loads((run / "samples.json").read_text())} == {"to be", "or"}


def test_the_exported_student_is_the_trained_one(finished):
    folder, _ = finished
    config, weights = open_huggingface(folder / "run" / "student")
    assert config["num_hidden_layers"] == 2
    assert len(weights) == 2 + 2 * 9
    assert weights["model.embed_tokens.weight"].shape == (258, 48)
    tokenizer = tokenizer_from_folder(folder / "run" / "student")
    assert tokenizer.decode(tokenizer.encode("to be")) == "to be"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / "run" / "student" / name).read_bytes() == (folder / "teacher" / name).read_bytes()


def test_the_students_card_tells_of_the_run_and_of_no_folder(finished):
    folder, summary = finished
    card = (folder / "run" / "student" / "README.md").read_text()
    for section in ("# run", "## Teacher", "## Student", "## Data", "## Objective", "## Results"):
        assert f"\n{section}\n" in card
    assert f"| {summary['kl_before']:.4f} | {summary['kl_after']:.4f} |" in card
    assert "- started from: the teacher's layers 0, 3\n" in card and "- training text: text\n" in card
    assert str(folder) not in card


def test_a_second_run_into_the_same_folder_is_refused_and_changes_nothing(finished):
    folder, _ = finished
    before = {p: p.stat().st_mtime_ns for p in sorted((folder / "run").rglob("*"))}
    with pytest.raises(UserError, match=r"expected a new or an empty folder.*--run OTHER"):
        distil(tiny_run(folder), console=QUIET)
    assert {p: p.stat().st_mtime_ns for p in sorted((folder / "run").rglob("*"))} == before


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
from pathlib import Path
from spmd_distill.runtime import prepare_jax
prepare_jax(8, fast_compile=True)
from tiny import tiny_run
from spmd_distill.train import distil
distil(tiny_run(Path({folder!r})))
"""


def test_sigkill_then_resume_is_bit_for_bit_the_run_that_was_never_killed(finished, tmp_path):
    expected, _ = finished
    config = tiny_run(tmp_path)
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL, env=dict(os.environ))
    committed = tmp_path / "run" / "checkpoints" / "2" / "manifest.json"
    deadline = time.monotonic() + 1200
    while not committed.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert committed.exists()
    done = [m.step for m in read_metrics(tmp_path / "run") if m.split == "train"]
    assert done, "killed before the first step was logged"
    distil(config, resume=True, console=QUIET)
    assert trace(tmp_path / "run") == trace(expected / "run")
    for found, original in zip(final_state(tmp_path / "run"), final_state(expected / "run"), strict=True):
        np.testing.assert_array_equal(found, original)


@pytest.mark.parametrize(("mesh", "mapper"), [("fsdp2_sp4", "pmap"), ("single", "vmap")])
def test_resuming_on_another_mesh_or_mapper_goes_on_with_the_same_losses(finished, tmp_path, mesh, mapper):
    expected, _ = finished
    config = tiny_run(tmp_path)

    train_until_first_checkpoint(config)
    flags = ("--mesh", mesh, "--mapper", mapper)
    distil(tiny_run(tmp_path, *flags), resume=True, console=QUIET)
    for found, original in zip(trace(tmp_path / "run"), trace(expected / "run"), strict=True):
        assert found[:2] == original[:2]
        for name, value in original[2].items():
            tolerance = 2e-2 if name in ("top1", "grad_norm") else 2e-4
            np.testing.assert_allclose(found[2][name], value, rtol=tolerance, err_msg=f"{name} at {found[:2]}")


def test_ctrl_c_saves_and_says_how_to_go_on(finished, tmp_path, monkeypatch):
    expected, _ = finished
    config = tiny_run(tmp_path, "--checkpoint.every", "100")
    real = Loop._judge

    def interrupt(self, step, state, values):
        real(self, step, state, values)
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=r"SIGINT at step 3 of 6.*--resume"):
        patch.setattr(Loop, "_judge", interrupt)
        distil(config, console=QUIET)
    distil(tiny_run(tmp_path), resume=True, console=QUIET)
    assert trace(tmp_path / "run") == trace(expected / "run")


INTERRUPTED = """
import os, signal, sys
from spmd_distill.cli import command, common

class Loses:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

common.prepare_jax = lambda devices: Loses() and None
sys.argv = ["spmd-distill", "train", {file!r}]
command()
"""


def test_ctrl_c_is_not_lost_in_what_is_imported(tmp_path):
    """As in a callback: an exception in a destructor goes nowhere."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(tiny_run(tmp_path))))
    script = INTERRUPTED.format(file=str(tmp_path / "run.yaml"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert not (tmp_path / "run").exists()


BAD = {
    "no such teacher": (["--teacher.path", "missing.gguf"], "missing.gguf"),
    "teacher is text": (["--teacher.path", "notes.txt"], "notes.txt"),
    "no such text": (["--data.train", "[nowhere]"], "nowhere"),
    "empty text": (["--data.train", "[empty.txt]"], "empty.txt"),
    "no such layout": (["--mesh", "dp2_tp5"], "Did you mean 'dp2_tp4'"),
    "layout too large": (["--mesh", "pod_fsdp16_tp4"], "64 devices"),
    "rows that do not fit": (["--mesh", "dp8"], "data.rows is 4"),
    "layers the teacher lacks": (["--student.layers", "[0,9]"], "0 to 3"),
    "unknown divergence": (["--objective.divergence", "forward"], "forward_kl"),
    "run folder is a file": (["--run", "notes.txt"], "notes.txt"),
    "run folder below a file": (["--run", "notes.txt/run"], "notes.txt"),
    "unknown setting": (["--optimizer.learningrate", "1"], "optimizer.learning_rate"),
    "wrong type": (["--steps", "many"], "steps"),
    "no steps": (["--steps", "0"], "at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_gives_one_clear_error_exit_2_and_leaves_nothing(name, tmp_path, monkeypatch, capsys):
    flags, expected = BAD[name]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(tiny_run(tmp_path))))
    (tmp_path / "notes.txt").write_text("not a model\n")
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    files = sorted(tmp_path.rglob("*"))
    assert main(["train", "run.yaml", *flags]) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed and "spmd-distill: error: " in printed and expected in printed
    assert sorted(tmp_path.rglob("*")) == files, "something half-written is left"


def test_wrong_weights_are_named(tmp_path, monkeypatch, capsys):
    from safetensors.numpy import load_file, save_file

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(tiny_run(tmp_path))))
    file = tmp_path / "teacher" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:-1].copy()
    save_file(weights, file, {"format": "pt"})
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    printed = capsys.readouterr().err
    assert "model.layers.1.mlp.up_proj.weight" in printed and "(39, 48)" in printed and "(40, 48)" in printed


@pytest.mark.parametrize("arguments", [["train"], ["train", "--resume", "nowhere"], ["verify", "--layouts", "dp2_tp5"]])
def test_other_mistakes_of_the_command(arguments, capsys):
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_unknown_flag_of_the_demo_exits_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--stepz", "3"])
    assert stop.value.code == 2
