"""A handful of what ``fuzz_run.py`` makes by the hundred, and proof that it would notice."""

from collections import Counter

import fuzz_run
import pytest

from spmd_distill import cli
from spmd_distill.errors import UserError

FEW = {"run file": 14, "text": 5, "teacher": 4, "checkpoints": 2}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return fuzz_run.prepare(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", FEW)
def test_what_is_malformed_is_one_sentence_and_changes_nothing(settings, tmp_path, kind):
    for seed in range(1000, 1000 + FEW[kind]):
        assert fuzz_run.check(kind, seed, tmp_path, settings) is None, f"{kind} {seed}"


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (lambda arguments: 1 / 0, "ZeroDivisionError"),
        (lambda arguments: 0, "exit code 0"),
        (lambda arguments: 2, "no single sentence"),
    ],
)
def test_other_answers_are_noticed(settings, tmp_path, monkeypatch, fault, complaint):
    monkeypatch.setattr(cli, "main", fault)
    assert complaint in fuzz_run.check("run file", 0, tmp_path, settings)


def test_a_file_left_behind_is_noticed(settings, tmp_path, monkeypatch):
    def leave(options, rest):
        (tmp_path / "left").write_text("over")
        raise UserError("no")

    monkeypatch.setattr(cli.train, "act", leave)
    assert "left" in fuzz_run.check("run file", 0, tmp_path, settings)


def test_every_kind_has_its_share():
    assert Counter(kind for kind, _ in fuzz_run.cases(200, 0)) == {
        "run file": 120, "text": 30, "teacher": 30, "checkpoints": 20
    }  # fmt: skip
