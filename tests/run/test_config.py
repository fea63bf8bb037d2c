"""Run files and flags: what is wrong is named by its line or flag, with what was expected and the nearest name."""

import dataclasses

import pytest
import yaml

from spmd_distill.config import RunConfig, parse_config, setting_names, to_dict
from spmd_distill.config.parse import _ELSEWHERE
from spmd_distill.errors import UserError

MISTAKES = {
    "steps: abc": "line 1: steps is 'abc'; expected a whole number",
    "seed: 0\nsteps: 10.5": "line 2: steps is 10.5; expected a whole number",
    "steps: null": "line 1: steps is null; expected a whole number",
    "steps: 3\nsteps: 4": "line 2: steps is said twice; it is in line 1",
    "steps: 0": "line 1: steps is 0; it must be at least 1",
    "\n\ndata:\n  rows: 0": "line 4: data.rows is 0; it must be at least 1",
    "optimiser:\n  learning_rate: 3": "line 1: unknown setting 'optimiser'. Did you mean the section 'optimizer'?",
    "optimizer:\n  learning_rte: 3": "line 2: unknown setting .* Did you mean 'optimizer.learning_rate'",
    "optimizer:\n  lr: 3": "line 2: unknown setting 'optimizer.lr'. It is called 'optimizer.learning_rate' here",
    "batch_size: 8": "line 1: unknown setting 'batch_size'. It is called 'data.rows' here",
    "remat: full": "line 1: unknown setting 'remat'. Did you mean 'student.remat'",
    "xyzzy: 1": "line 1: unknown setting 'xyzzy'. Known are run, steps, .* optimizer \\(a section\\)",
    "optimizer: 3": "line 1: optimizer is 3; expected a section with some of name",
    "optimizer:": "line 1: optimizer is None; expected a section",
    "optimizer:\n  b1: .nan": "line 2: optimizer.b1 is nan; expected a finite number",
    "mapper: foo": "line 1: mapper is 'foo'; expected one of shard_map, vmap, pmap",
    "student:\n  layers: [0, b]": r"line 2: student.layers is \[0, 'b'\]; expected a list of whole number values",
    "student: {remat: dts}": "line 1: student.remat is 'dts'; expected one of none, full, sums, dots",
    "steps: [1,": "line 1, column 11: is not YAML",
    "data:\n   rows: 4\n  length: 3": "line 3, column 3: is not YAML",
    "- a\n- b": "line 1: expected settings, such as `steps: 100`, found a list",
    "just words": "line 1: expected settings, such as `steps: 100`, found a single value",
    "1: 2": "line 1: expected the name of a setting, found 1",
    "": "is empty",
    "# only a comment": "is empty",
    "a: &a [*a]": "line 1: refers to itself",
    "steps: !!python/object/apply:os.getcwd []": "line 1, column 8: is not YAML",
    "\0": "is not YAML",
    "[" * 5000: "nested too deeply",
}


@pytest.mark.parametrize("text", MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_in_a_file_is_named_by_its_line(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=MISTAKES[text]) as caught:
        parse_config(path=path)
    assert str(caught.value).startswith(f"Run file {path}") and "\n" not in str(caught.value)


FLAGS = {
    ("--steps", "abc"): "Flag --steps: steps is 'abc'; expected a whole number",
    ("--steps=abc",): "Flag --steps: steps is 'abc'; expected a whole number",
    ("--steps",): "Flag --steps: has no value; expected a whole number",
    ("--steps", "0"): "Flag --steps: steps is 0; it must be at least 1",
    ("--optimizer.lr", "3"): "Flag --optimizer.lr: .* It is called 'optimizer.learning_rate' here",
    ("--optimizer", "3"): "Flag --optimizer: is a section; give one of its settings, as --optimizer.NAME VALUE",
    ("--step", "3"): "Flag --step: unknown setting 'step'. Did you mean 'steps'",
    ("--student.layers", "[1,a]"): "Flag --student.layers: student.layers is .*; expected a list of whole number",
    ("stray",): "'stray' stands alone; expected --SETTING VALUE",
    ("--optimizer.b1", ".nan"): "Flag --optimizer.b1: optimizer.b1 is nan; expected a finite number",
}


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_a_mistake_in_a_flag_is_named_by_the_flag(tmp_path, flags):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\n")
    with pytest.raises(UserError, match=FLAGS[flags]):
        parse_config(flags, path)


def test_no_file_and_no_text(tmp_path):
    with pytest.raises(UserError, match=r"no such file. `spmd-distill init .*absent.yaml` writes one"):
        parse_config(path=tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        parse_config(path=tmp_path)
    (tmp_path / "latin.yaml").write_bytes("run: caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match="cannot be read"):
        parse_config(path=tmp_path / "latin.yaml")


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\noptimizer: {learning_rate: 0.5, warmup_steps: 3}\n")
    found = parse_config(["--optimizer.learning_rate", "1e-4"], path)
    assert (found.steps, found.optimizer.learning_rate, found.optimizer.warmup_steps) == (7, 1e-4, 3)
    assert dataclasses.replace(
        found, steps=RunConfig().steps, optimizer=RunConfig().optimizer
    ) == RunConfig()  # fmt: skip


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(to_dict(RunConfig())))
    assert parse_config(path=path) == RunConfig() == parse_config()


def test_names_of_other_trainers_lead_to_settings_that_exist():
    assert set(_ELSEWHERE.values()) <= set(setting_names())
