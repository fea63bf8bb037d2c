"""The objective of a run file: every form, every mistake, classes of the user's own, schedules."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console
from tiny import as_flags, tiny_run

from spmd_distill.classes import OverSteps
from spmd_distill.cli import main
from spmd_distill.compose import build_objective, describe
from spmd_distill.config import ObjectiveConfig, parse_config, to_dict
from spmd_distill.config.numbers import Schedule
from spmd_distill.divergences import DIVERGENCES, ForwardKL
from spmd_distill.errors import UserError
from spmd_distill.objective import Objective

QUIET = Console(quiet=True)


def from_file(folder: Path, objective: str) -> ObjectiveConfig:
    (folder / "run.yaml").write_text(f"objective: {objective}\n")
    return parse_config(path=folder / "run.yaml").objective


FORMS = {
    "{}": "0.9 x forward_kl + 0.1 x ce",
    "{divergence: forward_kl, alpha: 1, temperature: 2}": "1 T^2 x forward_kl at T = 2",
    "{divergence: reverse_kl, alpha: 0}": "1 x ce",
    "{divergence: {generalized_jsd: {beta: 0.1, convention: interpolation}}, label_smoothing: 0.1}":
        "0.9 x generalized_jsd(beta 0.1, convention interpolation) + 0.1 x ce(label_smoothing 0.1)",
    "{divergence: {total_variation: {}}, z_loss: 1e-4}": "0.9 x total_variation + 0.1 x ce + 0.0001 x z_loss",
    "{alpha: {linear: [0.9, 0.5, 1000]}, support: {topk: 64}}":
        "(0.9 to 0.5 over 1000 steps, linear) x forward_kl + (1 - (0.9 to 0.5 over 1000 steps, linear)) x ce, over "
        "the teacher's 64 likeliest tokens and the rest as one",
    "{divergence: {skew_kl: {skew: {cosine: [0, 1, 9]}}}, alpha: 1, temperature: {exponential: [4, 1, 9]}}":
        "1 T^2 x skew_kl(skew (0 to 1 over 9 steps, cosine)) at T = (4 to 1 over 9 steps, exponential)",
    "{support: {sampled: {draws: 32, teacher_fraction: 1.0}}, z_loss: {piecewise: [[0, 0], [9, 1]]}, alpha: 1}":
        "1 x forward_kl + (0, from step 9 on 1) x z_loss, over 32 sampled tokens (100% by the teacher)",
    "{support: {sampled: 32}, terms: [{divergence: alpha, weight: 0.5, temperature: 2}, {divergence: alpha}, "
    "{divergence: {ce: {label_smoothing: 0.1}}, weight: {linear: [1, 0, 5]}, temperature: 1}, "
    "{divergence: normalized_logit_mse, temperature: 2.5, scale_by_temperature_squared: false}]}":
        "0.5 T^2 x alpha(alpha 0.5) at T = 2 + 1 x alpha(alpha 0.5) + (1 to 0 over 5 steps, linear) x "
        "ce(label_smoothing 0.1) + 1 x normalized_logit_mse(epsilon 1e-06) at T = 2.5, over 32 sampled tokens (50% by "
        "the teacher)",
    # both parameters pass through 0, but never together
    "{alpha: 1, divergence: {alpha_beta: {alpha: {linear: [1, 0, 9]}, beta: {linear: [0, 1, 9]}}}}":
        "1 x alpha_beta(alpha (1 to 0 over 9 steps, linear), beta (0 to 1 over 9 steps, linear))",
}  # fmt: skip


@pytest.mark.parametrize("written", FORMS)
def test_every_form_is_read_built_described_and_written_back(tmp_path, written):
    config = from_file(tmp_path, written)
    objective = build_objective(config)
    assert describe(objective) == FORMS[written]
    again = from_file(tmp_path, json.dumps(to_dict(config)))
    assert again == config and build_objective(again) == objective
    assert hash(objective) == hash(build_objective(again))  # the same schedules are the same program
    assert build_objective(parse_config(as_flags(written)).objective) == objective


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_every_divergence_has_a_name_in_a_run_file(name):
    assert build_objective(ObjectiveConfig(terms=[{"divergence": name}])).terms[0].divergence == DIVERGENCES[name]()


WRONG = {
    "{divergence: forwardkl}": r"divergence is 'forwardkl', which is unknown. Did you mean 'forward_kl'\?",
    "{divergence: zzz}": "which is unknown. Known are alpha, .*my_module:MyDivergence",
    "{divergence: [forward_kl]}": r"divergence is \['forward_kl'\]; expected a name such as forward_kl",
    "{divergence: {skew_kl: {skew: 0.1}, forward_kl: {}}}": "expected a name such as",
    "{divergence: {generalized_jsd: {bta: 1}}}": r"generalized_jsd: unknown parameter 'bta'. Did you mean 'beta'\?",
    "{divergence: {forward_kl: {beta: 1}}}": "forward_kl: unknown parameter 'beta'. Known are none.",
    "{divergence: {ce: {name: mine}}}": "ce: unknown parameter 'name'",
    "{divergence: {generalized_jsd: {beta: 2}}}": "beta is 2.0; expected a number between 0 and 1",
    "{divergence: {generalized_jsd: {beta: half}}}": "generalized_jsd.beta is 'half'; expected a number, or a schedule",
    "{divergence: {generalized_jsd: {beta: {linear: [0, 2, 9]}}}}": "beta is 2.0; expected a number between 0 and 1",
    "{divergence: {generalized_jsd: {convention: gdk}}}": "convention is 'gdk'; expected 'gkd' or 'interpolation'",
    "{divergence: {alpha_beta: {alpha: 0, beta: 0}}}": "alpha and beta are both 0",
    "{divergence: {normalized_logit_mse: {epsilon: {linear: [0, 1, 9]}}}}": "takes a number that stays",
    "{alpha: 2}": "alpha is 2; expected a number at least 0 and at most 1",
    "{alpha: often}": "alpha is 'often'; expected a number, or a schedule such as",
    "{alpha: null}": "alpha is None; expected a number",
    "{alpha: {linera: [0, 1, 9]}}": r"alpha: unknown schedule 'linera'. Did you mean 'linear'\?",
    "{alpha: {linear: [0, 1, 9], cosine: [0, 1, 9]}}": "expected one schedule: {linear",
    "{alpha: {linear: [0, 1]}}": r"alpha.linear is \[0, 1\]; expected {linear: \[from, to, steps\]}",
    "{alpha: {linear: [0, 1, 0]}}": "alpha.linear has step 0 at its end; it takes at least 1",
    "{alpha: {linear: [0, 2, 9]}}": "alpha.linear is 2.0; expected a number at least 0 and at most 1",
    "{alpha: {cosine: [0, 1, 1.5]}}": r"expected {cosine: \[from, to, steps\]}",
    "{alpha: {piecewise: [0, 1, 9]}}": r"expected {piecewise: \[\[0, value\]",
    "{alpha: {piecewise: [[5, 0.1]]}}": "begins at step 5; the first step is 0",
    "{alpha: {piecewise: [[0, 0.1], [9, 0.2], [9, 0.3]]}}": "step 9 out of order",
    "{temperature: 0}": "temperature is 0; expected a number above 0",
    "{temperature: {exponential: [0, 1, 9]}}": "both ends must be above 0",
    "{label_smoothing: 1.5}": "label_smoothing is 1.5; expected a number at least 0 and at most 1",
    "{z_loss: -1}": "z_loss is -1; expected a number at least 0",
    "{z_loss: .nan}": "z_loss is nan; expected a number",
    "{support: half}": r"support is 'half'; expected full, {topk: 64} or {sampled: 32}",
    "{support: {topk: 0}}": "support.topk is 0; expected a whole number of at least 1",
    "{support: {sampled: {drawz: 3}}}": r"unknown setting 'drawz'. Did you mean 'draws'\?",
    "{support: {sampled: {draws: 3, teacher_fraction: 0}}}": "teacher_fraction is 0; expected a number above 0",
    "{terms: []}": r"terms is \[\]; expected a list of terms",
    "{terms: [forward_kl]}": r"terms\[0\] is 'forward_kl'; expected a mapping such as",
    "{terms: [{weight: 1}]}": r"terms\[0\] has no divergence",
    "{terms: [{divergence: ce}, {divergence: ce, wieght: 1}]}": r"terms\[1\]: unknown setting 'wieght'. .* 'weight'\?",
    "{terms: [{divergence: ce, temperature: -1}]}": r"terms\[0\].temperature is -1; expected a number above 0",
    "{terms: [{divergence: ce, scale_by_temperature_squared: 1}]}": "expected true or false",
    "{terms: [{divergence: ce}], alpha: 0.5}": "terms replaces objective.alpha, which is 0.5",
    "{vocab_size: 0}": "vocab_size is 0; it must be at least 1, or null",
    "{alhpa: 0.5}": r"unknown setting 'objective.alhpa'. Did you mean 'objective.alpha'\?",
}


@pytest.mark.parametrize("written", WRONG)
def test_every_mistake_is_named(tmp_path, written):
    with pytest.raises(UserError, match=WRONG[written]):
        build_objective(from_file(tmp_path, written))


def test_the_command_says_the_mistake_and_exits_with_2(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(tiny_run(tmp_path))))
    for flag, value in (
        ("alpha", "{linera: [0, 1, 9]}"),
        ("divergence", "{skew_kl: {skew: 3}}"),
        ("vocab_size", "999"),
    ):
        assert main(["train", str(tmp_path / "run.yaml"), f"--objective.{flag}", value]) == 2
        printed = capsys.readouterr().err
        assert "spmd-distill: error: " in printed and f"objective.{flag}" in printed and "Traceback" not in printed
    assert not (tmp_path / "run").exists()


def test_the_resolved_objective_of_an_older_run_is_still_read(tmp_path):
    old = from_file(tmp_path, "{divergence: forward_kl, alpha: 0.75, temperature: 2.0}")
    assert build_objective(old) == Objective.mix(ForwardKL(), 0.75, 2.0)


def test_what_a_divergence_warns_about_is_said():
    said = []
    build_objective(ObjectiveConfig(divergence={"generalized_jsd": {"beta": 0.99}}), say=said.append)
    assert len(said) == 1 and "1.0% of the gradient of KL" in said[0]


MINE = '''
from dataclasses import dataclass

import jax.numpy as jnp

from spmd_distill.divergences import AbstractSeparable, Scheduled


@dataclass(frozen=True)
class Triangular(AbstractSeparable):
    power: Scheduled = 2.0
    unit: str = "nats"

    def __post_init__(self):
        if self.unit != "nats":
            raise ValueError(f"no unit {self.unit}")

    def integrand(self, teacher_logp, student_logp):
        p, q = jnp.exp(teacher_logp), jnp.exp(student_logp)
        return jnp.abs(p - q) ** self.power / (p + q)


class TopOne(AbstractSeparable):
    """Called top_one."""

    def integrand(self, teacher_logp, student_logp):
        return student_logp * 0


class Top1(TopOne):
    """Called as a metric is."""
'''


def test_a_class_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "users_losses.py").write_text(MINE)
    (tmp_path / "my_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    objective = build_objective(
        ObjectiveConfig(divergence={"users_losses:Triangular": {"power": {"linear": [1, 2, 9]}}})
    )
    assert describe(objective).startswith("0.9 x triangular(power (1 to 2 over 9 steps, linear), unit nats)")
    assert describe(build_objective(ObjectiveConfig("users_losses:TopOne"))) == "0.9 x top_one + 0.1 x ce"
    for written, message in {
        "users_losses:Triangle": "has nothing of that name; expected a subclass of "
        "AbstractSeparable or AbstractRowwise",
        "users_losses:Scheduled": "is no divergence",
        "my_other_losses:Triangular": "there is no module 'my_other_losses' in the current folder nor on Python's path",
        "my_broken:Triangular": "importing it raised ZeroDivisionError: division by zero",
        "users_losses:Top1": "called 'top1', as a metric of every run is",
    }.items():
        with pytest.raises(UserError, match=message):
            build_objective(ObjectiveConfig(written))
    for parameters, message in {
        "powr": "unknown parameter 'powr'. Did you mean 'power'",
        "unit": "users_losses:Triangular: no unit 3",
    }.items():
        with pytest.raises(UserError, match=message):
            build_objective(ObjectiveConfig({"users_losses:Triangular": {parameters: 3}}))


def test_schedules_of_optax_are_what_the_run_file_says():
    for kind in ("linear", "cosine", "exponential"):
        schedule = Schedule(kind, ((0, 0.9), (8, 0.5)))
        found = [float(OverSteps(schedule)(step)) for step in range(11)]
        np.testing.assert_allclose(found, [schedule.at(step) for step in range(11)], rtol=1e-6)
        assert found[0] == pytest.approx(0.9) and found[8] == found[10] == pytest.approx(0.5)
    middle = {kind: Schedule(kind, ((0, 1.0), (8, 4.0))).at(4) for kind in ("linear", "cosine", "exponential")}
    assert middle == pytest.approx({"linear": 2.5, "cosine": 2.5, "exponential": 2.0})
    steps = Schedule("piecewise", ((0, 0.9), (3, 0.5), (5, 0.1)))
    assert [round(float(OverSteps(steps)(k)), 6) for k in range(7)] == [0.9, 0.9, 0.9, 0.5, 0.5, 0.1, 0.1]
    assert [steps.at(k) for k in range(7)] == [0.9, 0.9, 0.9, 0.5, 0.5, 0.1, 0.1]
