"""Losses inside the network in whole runs: layers that are found, metrics, resume, export, and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from tiny import tiny_run, train_until_first_checkpoint

from spmd_distill import pairing
from spmd_distill.build import set_up
from spmd_distill.cli import main
from spmd_distill.config import RunConfig
from spmd_distill.metrics import CLOCKED, read_metrics
from spmd_distill.pretrained import load_pretrained
from spmd_distill.program.flops import step_flops
from spmd_distill.program.wire import wire_bytes
from spmd_distill.proof import verify
from spmd_distill.runs import evaluate_run, open_run
from spmd_distill.train import distil
from spmd_distill.types import Batch

QUIET = Console(quiet=True)
FEATURES = (
    "[{feature: {hidden_states: {distance: cosine}}, layers: best, weight: {linear: [2, 0, 4]}}, "
    "{feature: {hidden_states: {at: final_norm, projection: shared}}, weight: 0.5}]"
)
SETTINGS = ("--student.init", "random", "--student.width", "32", "--eval.samples", "false", "--eval.prompts", "[to]")
pytestmark = pytest.mark.usefixtures("light")


def settings(folder: Path, *flags: str) -> RunConfig:
    """A narrower student, so that hidden states are projected."""
    return tiny_run(folder, *SETTINGS, "--objective.features", FEATURES, *flags)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, light) -> tuple[Path, str]:
    """The folder of a run, and what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    with open(folder / "printed", "w") as file:
        distil(settings(folder), console=Console(file=file, width=300))
    return folder, (folder / "printed").read_text()


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    shutil.copytree(trained[0] / "run", tmp_path / "run")
    return tmp_path / "run"


def lines(run: Path, split: str) -> list[tuple[int, dict]]:
    found = [(line.step, line.values) for line in read_metrics(run) if line.split == split]
    return [(step, {k: v for k, v in values.items() if k not in CLOCKED}) for step, values in found]


def test_metrics_have_every_term_and_add_up_to_the_loss(trained):
    run = trained[0] / "run"
    for i, (_, line) in enumerate(lines(run, "train")):
        weight = max(2 - i / 2, 0)
        assert line.get("hidden_states.weight") == pytest.approx(weight)
        total = 0.9 * line["forward_kl"] + 0.1 * line["ce"]
        total += weight * line["hidden_states"] + 0.5 * line["hidden_states_2"]
        assert line["loss"] == pytest.approx(total, rel=1e-5)
    assert all({"hidden_states", "hidden_states_2", "kl"} <= line.keys() for _, line in lines(run, "eval"))
    summary, last = json.loads((run / "summary.json").read_text()), lines(run, "eval")[-1][1]
    assert summary["hidden_states_after"] == last["hidden_states"] != summary["hidden_states_before"]
    assert f"{last['hidden_states_2']:.4g} │" in trained[1]
    assert b"hidden_states_2" in b"".join(path.read_bytes() for path in (run / "tensorboard").iterdir())


def test_layers_are_found_said_and_left_in_the_folder(trained):
    folder, printed = trained
    found = json.loads((folder / "run" / "layers.json").read_text())
    entry = found["hidden_states"]
    assert np.shape(entry["cka"]) == (2, 4) and np.min(entry["cka"]) >= 0 and np.max(entry["cka"]) <= 1
    (s0, t0), (s1, t1) = entry["pairs"]
    assert (s0, s1) == (0, 1) and t0 < t1
    sums = {(a, b): entry["cka"][0][a] + entry["cka"][1][b] for a in range(4) for b in range(a + 1, 4)}
    assert (t0, t1) == max(sums, key=sums.__getitem__)
    shown = f"0-{t0} ({entry['cka'][0][t0]:.3f}) 1-{t1} ({entry['cka'][1][t1]:.3f})"
    assert f"hidden_states at block_output, best layers by CKA: {shown}" in printed
    said = f"x hidden_states(distance cosine) at block_output, layers 0-{t0} 1-{t1} + 0.5 x hidden_states(projection"
    assert said in printed
    assert f"0-{t0} 1-{t1}" in json.loads((folder / "run" / "compiled.json").read_text())["objective"]
    assert found["hidden_states_2"] == {"taps": ["final_norm"], "layers": "given", "pairs": [[1, 3]]}
    assert (folder / "run" / "layers.png").stat().st_size > 1000


def test_a_resumed_run_is_the_same_bit_for_bit_and_finds_nothing_again(trained, tmp_path, monkeypatch):
    config = settings(tmp_path)
    train_until_first_checkpoint(config)
    monkeypatch.setattr(pairing, "layer_similarity", lambda *args: pytest.fail("compared again"))
    distil(config, resume=True, console=QUIET)
    one, other = trained[0] / "run", tmp_path / "run"
    assert (other / "layers.json").read_text() == (one / "layers.json").read_text()
    for split in ("train", "eval"):
        assert lines(one, split) == lines(other, split)
    first, second = (open_run(run).params for run in (one, other))
    assert first["features"].keys() == {"hidden_states", "hidden_states_2"}
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_an_exported_student_has_nothing_of_the_losses(trained, tmp_path):
    run = trained[0] / "run"
    student = load_pretrained(run / "student")
    assert load_file(run / "student" / "model.safetensors").keys() == {
        "model.embed_tokens.weight", "model.norm.weight",
        *(f"model.layers.{i}.{n}.weight" for i in range(2) for n in (
            "input_layernorm", "post_attention_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj",
            "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj",
        )),
    }  # fmt: skip
    assert student.model.config.width == 32
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == load_file(run / "student" / "model.safetensors").keys()
    )


def test_its_own_parameters_learn_and_are_scored_again(trained):
    opened = open_run(trained[0] / "run")
    born = opened.setup.run.trained.complete({}, opened.setup.run.mapper, 0)["features"]
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), born, opened.params["features"])
    assert min(jax.tree.leaves(moved)) > 1e-5
    found, (_, last) = evaluate_run(opened), lines(trained[0] / "run", "eval")[-1]
    assert {name: found[name] for name in last if name in found} == pytest.approx(last, rel=1e-5)


@pytest.mark.parametrize("features", ["null", FEATURES.replace("cosine", "mse")])
def test_other_losses_are_another_training(copy, capsys, features):
    assert main(["train", "--resume", str(copy), "--objective.features", features]) == 2
    said = capsys.readouterr().err.partition("spmd-distill: error: ")[2]
    assert "was trained with other settings: objective.features: [{" in said and "--allow-changes" in said


@pytest.mark.parametrize("damage", ["gone", "cut", "others"])
def test_a_run_that_lost_its_layers_is_not_resumed(copy, capsys, damage):
    file = copy / "layers.json"
    found = json.loads(file.read_text())
    found["hidden_states"]["layers"] = {"best": 1}
    file.write_text({"cut": file.read_text()[:60]}.get(damage, json.dumps(found)))
    if damage == "gone":
        file.unlink()
    for command in (["train", "--resume", str(copy)], ["eval", str(copy)]):
        assert main(command) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "layers.json: it does not say which layers this run compares (hidden_states" in said
        assert "Put the file back" in said and "Traceback" not in said
    assert main(["doctor", str(copy)]) == (0 if damage == "others" else 1)


def test_other_commands_take_such_a_run(trained, tmp_path, capsys):
    run = trained[0] / "run"
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "hidden_states_2" in page
    assert main(["doctor", str(run)]) == 0


def test_the_student_is_frozen_while_projections_learn(tmp_path):
    setup = set_up(settings(tmp_path, "--optimizer.freeze", '["embed*", "layers*", "norm*"]'))
    named = jax.tree_util.tree_leaves_with_path(setup.tx.trained)
    assert {jax.tree_util.keystr(path[:1]) for path, moves in named if moves} == {"['features']"}


def test_their_operations_and_collectives_are_counted(tmp_path):
    given = ("null", "[{feature: hidden_states}]")
    plain, more = (set_up(tiny_run(tmp_path, *SETTINGS, "--objective.features", x)).run for x in given)
    rows = np.zeros((2, 4, 16), np.int32)
    batch = Batch(rows, rows, rows > -1, rows, rows)
    found = step_flops(more, batch) - step_flops(plain, batch)
    matmul = 2 * rows.size * 32 * 48 * 2  # a multiplication and an addition, for two pairs of layers
    assert found == 4 * matmul  # forward, two gradients, and the forward again in the backward pass
    assert wire_bytes(more, batch) > wire_bytes(plain, batch)


def test_the_proof_takes_them(tmp_path):
    given = "[{feature: hidden_states, layers: [[1, 3]]}, {feature: {hidden_states: {at: final_norm}}}]"
    config = tiny_run(tmp_path, *SETTINGS, "--objective.features", given, "--objective.terms", "[{divergence: ce}]")
    report = verify(["dp2_tp4"], ["vmap"], config=config)
    assert report["ok"], report["worst"]
