"""Losses inside the network in run files: every form, every mistake, classes of the user's own, layer maps."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tiny import as_flags

from spmd_distill.compose import build_objective, describe, moving_numbers, unmatched, with_pairs
from spmd_distill.config import ObjectiveConfig, parse_config, to_dict
from spmd_distill.errors import UserError
from spmd_distill.features import FEATURES
from spmd_distill.features.matching import best_pairs
from spmd_distill.models import DecoderConfig

SIZES = {"vocab_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 32}
STUDENT, TEACHER = DecoderConfig(width=24, layers=4, **SIZES), DecoderConfig(width=32, layers=8, **SIZES)


def from_file(folder: Path, objective: str) -> ObjectiveConfig:
    (folder / "run.yaml").write_text(f"objective: {objective}\n")
    return parse_config(path=folder / "run.yaml").objective


PLAIN = "0.9 x forward_kl + 0.1 x ce + "
FORMS = {
    "{features: [{feature: hidden_states}]}": PLAIN + "1 x hidden_states at block_output, layers 0-1 1-3 2-5 3-7",
    "{alpha: 1, features: [{feature: {hidden_states: {distance: cosine, at: block_input}}, layers: {uniform: 2}, "
    "weight: 0.5}]}": "1 x forward_kl + 0.5 x hidden_states(distance cosine) at block_input, layers 1-3 3-7",
    "{features: [{feature: {hidden_states: {at: final_norm}}, weight: {linear: [1, 0, 9]}}, {feature: hidden_states, "
    "layers: [[3, 7], [0, 0]]}]}": PLAIN + "(1 to 0 over 9 steps, linear) x hidden_states at final_norm + 1 x "
    "hidden_states at block_output, layers 0-0 3-7",
    "{terms: [{divergence: reverse_kl}, {feature: hidden_states, layers: last}], features: [{feature: "
    "{hidden_states: null}, layers: {last: 2}, weight: 2}]}": "1 x reverse_kl + 1 x hidden_states at block_output, "
    "layers 3-7 + 2 x hidden_states at block_output, layers 2-6 3-7",
    "{terms: [{feature: {hidden_states: {pool: 8}}, layers: best}]}":
        "1 x hidden_states(pool 8) at block_output, layers 0-1 1-3 2-5 3-7",
}  # fmt: skip


@pytest.mark.parametrize("written", FORMS)
def test_every_form_is_read_built_described_and_written_back(tmp_path, written):
    config = from_file(tmp_path, written)
    objective = build_objective(config)
    assert describe(objective, objective.inside(STUDENT, TEACHER)) == FORMS[written]
    again = from_file(tmp_path, json.dumps(to_dict(config)))
    assert again == config and build_objective(again) == objective
    assert hash(objective) == hash(build_objective(again))
    assert build_objective(parse_config(as_flags(written)).objective) == objective


def test_many_pairs_are_shortened():
    objective = build_objective(ObjectiveConfig(features=[{"feature": "hidden_states"}]))
    deep = DecoderConfig(width=24, layers=12, **SIZES)
    said = describe(objective, objective.inside(deep, deep))
    assert said.endswith("layers 0-0 1-1 2-2 ... 10-10 11-11 (12 pairs)")


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_every_loss_has_a_name_in_a_run_file(name):
    objective = build_objective(ObjectiveConfig(features=[{"feature": name}]))
    assert objective.labels == ("forward_kl", "ce", FEATURES[name]().name)
    assert objective.terms[-1].loss == FEATURES[name]()
    assert f"`{name}`" in (Path(__file__).parents[2] / "docs" / "features.md").read_text()


def test_weights_move():
    entry = {"feature": "hidden_states", "weight": {"linear": [1, 0, 4]}}
    objective = build_objective(ObjectiveConfig(features=[entry, entry | {"weight": 3}]))
    assert moving_numbers(objective, 1) == {"hidden_states.weight": 0.75}


def test_best_stands_open_until_models_are_compared():
    entries = [{"feature": {"hidden_states": {"at": at}}, "layers": {"best": 2}} for at in ("final_norm", "mlp_output")]
    objective = build_objective(ObjectiveConfig(features=entries))
    assert unmatched(objective) == {"hidden_states_2": (("mlp_output",), 2)}  # the final norm has no layers to choose
    paired = with_pairs(objective, {"hidden_states_2": ((1, 2), (3, 4))})
    assert not unmatched(paired) and describe(paired, paired.inside(STUDENT, TEACHER)).endswith("layers 1-2 3-4")


WRONG = {
    "{features: hidden_states}": r"objective.features is 'hidden_states'; expected a list of terms such as {feature",
    "{features: []}": r"features is \[\]; expected a list",
    "{features: [hidden_states]}": r"features\[0\] is 'hidden_states'; expected a mapping such as {feature",
    "{features: [{weight: 1}]}": r"features\[0\] has no feature: {'weight': 1}; expected one such as {feature",
    "{features: [{feature: hidden_states, layer: last}]}": r"features\[0\]: unknown setting 'layer'. .* 'layers'\?",
    "{features: [{feature: hidden_states, temperature: 2}]}": "unknown setting 'temperature'",
    "{features: [{feature: hiden_states}]}": r"features\[0\].feature is 'hiden_states', .* mean 'hidden_states'\?",
    "{features: [{feature: zzz}]}": "which is unknown. Known are .*hidden_states.*my_module:MyLoss",
    "{features: [{feature: [hidden_states]}]}": r"feature is \['hidden_states'\]; expected a name such as",
    "{features: [{feature: {hidden_states: {distanse: mse}}}]}": r"unknown parameter 'distanse'. .* 'distance'\?",
    "{features: [{feature: {hidden_states: {distance: far}}}]}": r"feature.hidden_states: .* distance is 'far'; expect",
    "{features: [{feature: {hidden_states: {delta: {linear: [1, 2, 3]}}}}]}": "delta is a schedule, but .* stays",
    "{features: [{feature: hidden_states, layers: unifrom}]}": "layers is 'unifrom'; expected uniform, last, best, one",
    "{features: [{feature: hidden_states, layers: {unifrom: 2}}]}": r"unknown layer map 'unifrom'. .* 'uniform'\?",
    "{features: [{feature: hidden_states, layers: {last: 0}}]}": "layers.last is 0; expected a whole number of at leas",
    "{features: [{feature: hidden_states, layers: {last: 1, best: 1}}]}": "expected uniform, last, best, one of them",
    "{features: [{feature: hidden_states, layers: [0, 2]}]}": r"layers is \[0, 2\]; expected pairs of a layer",
    "{features: [{feature: hidden_states, layers: [[0, -1]]}]}": "counted from 0, such as",
    "{features: [{feature: hidden_states, layers: []}]}": r"layers is \[\]; expected uniform",
    "{features: [{feature: hidden_states, weight: much}]}": r"features\[0\].weight is 'much'; expected a number, or a",
    "{terms: [{feature: hidden_states, weight: much}]}": r"terms\[0\].weight is 'much'",
    "{terms: [{feature: hidden_states, divergence: ce}]}": "unknown setting 'feature'",
    "{terms: [{feature: hidden_states}], alpha: 0.5}": "terms replaces objective.alpha",
}


@pytest.mark.parametrize("written", WRONG)
def test_every_mistake_is_named(tmp_path, written):
    with pytest.raises(UserError, match=WRONG[written]):
        build_objective(from_file(tmp_path, written))


MISFITS = {
    "{feature: hidden_states, layers: [[4, 0]]}": r"Layer pair \[4, 0\]: .* student, 0 to 3, .* teacher, 0 to 7",
    "{feature: hidden_states, layers: {best: 5}}": "Layer map best: count is 5; expected 1 to 4",
    "{feature: {hidden_states: {projection: none}}}": "projection is none, .* have 24 channels and the teacher's 32",
}


@pytest.mark.parametrize("written", MISFITS)
def test_what_does_not_fit_the_models_is_named(tmp_path, written):
    objective = build_objective(from_file(tmp_path, f"{{features: [{{feature: hidden_states}}, {written}]}}"))
    with pytest.raises(UserError, match=f"^hidden_states_2: .*{MISFITS[written]}"):
        objective.inside(STUDENT, TEACHER)


MINE = """
from dataclasses import dataclass

import jax.numpy as jnp

from spmd_distill.features import AbstractFeatureLoss


@dataclass(frozen=True)
class Louder(AbstractFeatureLoss):
    power: float = 2.0

    @property
    def taps(self):
        return ("block_output",)

    def __call__(self, student, teacher, tokens, params):
        norm = lambda side: jnp.linalg.norm(side.taps["block_output"].astype(jnp.float32), axis=-1)
        return tokens.total(jnp.abs(norm(student) - norm(teacher)) ** self.power, tokens.here(tokens.valid),
                            shared=tokens.sequence_sharded)
"""


def test_a_class_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "users_insides.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    objective = build_objective(ObjectiveConfig(features=[{"feature": {"users_insides:Louder": {"power": 3}}}]))
    assert objective.labels[-1] == "louder" and describe(objective).endswith("louder(power 3) at block_output")
    for written, message in {
        "users_insides:Lauder": "has nothing of that name; expected a subclass of AbstractFeatureLoss",
        "users_insides:dataclass": "is no loss inside the network",
    }.items():
        with pytest.raises(UserError, match=message):
            build_objective(ObjectiveConfig(features=[{"feature": written}]))


@pytest.mark.parametrize(("students", "teachers"), [(1, 3), (3, 6), (4, 4), (5, 3), (4, 7)])
def test_the_best_pairs_are_the_best_of_all_that_do_not_cross(students, teachers):
    for seed in range(5):
        cka = np.random.default_rng(seed).random((students, teachers))
        least = 0 if students > teachers else 1
        every = itertools.product(range(teachers), repeat=students)
        choices = [c for c in every if all(b - a >= least for a, b in itertools.pairwise(c))]
        best = max(choices, key=lambda c: sum(cka[s, t] for s, t in enumerate(c)))
        assert best_pairs(cka) == tuple(enumerate(best))


def test_equal_layers_of_the_best_pairs():
    assert best_pairs(np.ones((3, 6))) == ((0, 0), (1, 1), (2, 2))
    assert best_pairs(np.eye(6)[[1, 2, 4, 5]], 2) == ((1, 2), (3, 5))
    with pytest.raises(UserError, match="count is 5; expected 1 to 4"):
        best_pairs(np.ones((4, 6)), 5)
