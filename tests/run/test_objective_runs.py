"""Objectives in whole runs: schedules that move and resume, vocabularies that differ, and the proof of any of them."""

from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from tiny import as_flags, tiny_run, tiny_teacher, train_until_first_checkpoint

from spmd_distill.compose import build_objective, describe_vocabulary, shared_vocabulary
from spmd_distill.config import ObjectiveConfig, parse_config
from spmd_distill.errors import UserError
from spmd_distill.metrics import CLOCKED, read_metrics
from spmd_distill.proof import verify
from spmd_distill.step import Distillation
from spmd_distill.train import distil

QUIET = Console(quiet=True)

MOVING = (
    "--objective.divergence", "{skew_kl: {skew: {linear: [0.0, 0.5, 5]}}}",
    "--objective.alpha", "{linear: [0.9, 0.5, 4]}",
    "--objective.temperature", "{piecewise: [[0, 2.0], [3, 1.5]]}",
    "--objective.z_loss", "0.01",
)  # fmt: skip


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> tuple[Path, dict, list, str]:
    """A whole run with everything on schedules, the training steps it compiled, and what it printed."""
    folder, console, made = tmp_path_factory.mktemp("moved"), Console(record=True, width=200, quiet=False), []
    real = Distillation.train_step

    def remember(self, tx, **options):
        made.append(real(self, tx, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distillation, "train_step", remember)
        with open(folder / "printed", "w") as file:
            console.file = file
            summary = distil(tiny_run(folder, *MOVING), console=console)
    return folder, summary, made, (folder / "printed").read_text()


def train_lines(folder: Path) -> list:
    return [m for m in read_metrics(folder / "run") if m.split == "train"]


def test_schedules_move_in_a_run_and_compile_nothing(moved):
    folder, _, made, _ = moved
    assert [step._cache_size() for step in made] == [0]  # compiled once, ahead of time: it refuses anything else
    lines = [m.values for m in train_lines(folder)]
    for name, expected in {
        "skew_kl.weight": [0.9, 0.8, 0.7, 0.6, 0.5, 0.5],
        "ce.weight": [0.1, 0.2, 0.3, 0.4, 0.5, 0.5],
        "skew_kl.temperature": [2.0, 2.0, 2.0, 1.5, 1.5, 1.5],
        "skew_kl.skew": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5],
    }.items():
        np.testing.assert_allclose([line[name] for line in lines], expected, rtol=1e-6, atol=1e-7, err_msg=name)
    for line in lines:  # the terms' own values, with the weights of their step, are the loss
        scaled = line["skew_kl.weight"] * line["skew_kl.temperature"] ** 2 * line["skew_kl"]
        total = scaled + line["ce.weight"] * line["ce"] + 0.01 * line["z_loss"]
        np.testing.assert_allclose(line["loss"], total, rtol=1e-5)
        np.testing.assert_allclose(line["perplexity_student"], np.exp(line["ce_student"]), rtol=1e-5)
        assert {"kl", "kl_reverse", "entropy_student", "entropy_teacher", "top1", "acceptance"} <= line.keys()


def test_a_run_says_what_it_compiled(moved):
    _, summary, _, printed = moved
    said = " ".join(printed.split())
    assert "objective: (0.9 to 0.5 over 4 steps, linear) T^2 x skew_kl(skew (0 to 0.5 over 5 steps, linear))" in said
    assert said.count("vocabulary: 258 tokens") == 1
    assert [term.split(" x ")[-1].split("(")[0] for term in summary["objective"]] == ["skew_kl", "ce", "z_loss"]
    assert summary["vocab_size"] == 258


def test_a_resumed_schedule_goes_on_where_it_was(moved, tmp_path):
    train_until_first_checkpoint(tiny_run(tmp_path, *MOVING))
    resumed = parse_config(path=tmp_path / "run" / "config.yaml")  # as --resume reads it
    assert resumed == tiny_run(tmp_path, *MOVING)
    distil(resumed, resume=True, console=QUIET)
    found, expected = ([(m.step, m.values) for m in train_lines(f)] for f in (tmp_path, moved[0]))
    for (step, values), (other, wanted) in zip(found, expected, strict=True):
        assert step == other
        for name in wanted.keys() - set(CLOCKED):
            assert values[name] == wanted[name], (step, name)


def test_padding_of_the_embedding_is_no_vocabulary(tmp_path):
    """A tokenizer of 258 tokens, 300 rows: said once, and the rows beyond get nothing."""
    tiny_teacher(tmp_path / "teacher", rows=300)
    config = tiny_run(tmp_path, "--steps", "1", "--student.dropout", "0", "--objective.support", "{topk: 8}")
    with open(tmp_path / "printed", "w") as file:
        summary = distil(config, console=Console(file=file, width=200))
    printed = (tmp_path / "printed").read_text()
    assert printed.count("vocabulary: 258 tokens of the tokenizer; teacher has 300, student 300 rows") == 1
    assert summary["vocab_size"] == 258
    with pytest.raises(
        UserError, match=r"vocab_size is 301, but the teacher has 300 .* at most 300, or null for the 258"
    ):
        distil(tiny_run(tmp_path, "--objective.vocab_size", "301", "--run", str(tmp_path / "other")), console=QUIET)
    with pytest.raises(UserError, match="a vocabulary of 50"):
        distil(tiny_run(tmp_path, "--objective.vocab_size", "50", "--run", str(tmp_path / "other")), console=QUIET)


def test_vocabularies_of_two_models():
    sizes = (151665, 152064, 151936)
    assert shared_vocabulary(None, *sizes) == 151665 and shared_vocabulary(1000, *sizes) == 1000
    assert shared_vocabulary(None, 60, 50, 40) == 40
    objective = build_objective(ObjectiveConfig(), shared_vocabulary(None, *sizes))
    assert describe_vocabulary(objective, *sizes) == (
        "vocabulary: 151665 tokens of the tokenizer; teacher has 152064, student 151936 rows"
    )


PROVED = {
    "terms, sampled": "{support: {sampled: {draws: 5, teacher_fraction: 1.0}}, terms: [{divergence: reverse_kl, "
    "temperature: 2}, {divergence: {skew_kl: {skew: {linear: [0, 1, 3]}}}, weight: {exponential: [1, 0.1, 3]}}, "
    "{divergence: normalized_logit_mse}, {divergence: {ce: {label_smoothing: 0.1}}}, {divergence: z_loss}]}",
    "top-k": "{divergence: generalized_jsd, temperature: {linear: [2, 1, 3]}, support: {topk: 7}}",
    "another vocabulary": "{divergence: sorted_logit_uld}",
}


@pytest.mark.parametrize("name", PROVED)
def test_the_proof_takes_any_objective_of_a_run_file(tmp_path, name):
    tiny_teacher(tmp_path / "teacher", rows=300)
    config = tiny_run(tmp_path, *as_flags(PROVED[name]))
    try:
        report = verify(["fsdp2_tp4"], ["shard_map"], config=config)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert report["ok"], report
