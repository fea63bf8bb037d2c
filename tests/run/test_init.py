"""``spmd-distill init``: every setting is in the file it writes, and the file means what the preset means."""

import re
from pathlib import Path

import pytest

from spmd_distill.cli import main
from spmd_distill.cli.demo import demo_config
from spmd_distill.cli.init import PRESETS
from spmd_distill.config import RunConfig, parse_config, setting_names
from spmd_distill.config.describe import settings_page
from spmd_distill.config.source import flatten, read_run_file
from spmd_distill.runtime import run_files_folder
from spmd_distill.sharding import MeshLayout


@pytest.mark.parametrize("preset", PRESETS)
def test_the_file_is_the_preset_with_all_other_settings_as_comments(tmp_path, preset, capsys):
    path = tmp_path / "run.yaml"
    assert main(["init", str(path), "--preset", preset, "--seed", "3", "--optimizer.learning_rate", "0.25"]) == 0
    assert f"spmd-distill train {path}" in " ".join(capsys.readouterr().err.split())
    original = run_files_folder() / f"{preset}.yaml"
    expected = parse_config(["--seed", "3", "--optimizer.learning_rate", "0.25"], original)
    assert parse_config(path=path) == expected
    active = flatten(read_run_file(path)[0]).keys()
    assert active == flatten(read_run_file(original)[0]).keys() | {"seed", "optimizer.learning_rate"}
    path.write_text(re.sub(r"^( *)#(?! )", r"\1", path.read_text(), flags=re.M))  # all commented settings
    assert parse_config(path=path) == expected
    names = flatten(read_run_file(path)[0]).keys()
    assert all(any(n == name or n.startswith(f"{name}.") for n in names) for name in setting_names())


def test_what_is_there_stays(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 1\n")
    assert main(["init", str(path)]) == 2
    assert "is there already" in capsys.readouterr().err and path.read_text() == "steps: 1\n"
    assert main(["init", str(tmp_path / "no" / "run.yaml")]) == 2
    assert main(["init", str(tmp_path / "other.yaml"), "--optimizer.lr", "1"]) == 2
    assert "optimizer.learning_rate" in capsys.readouterr().err and not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_name_layouts_that_exist(preset):
    mesh = parse_config(path=run_files_folder() / f"{preset}.yaml").mesh
    assert mesh == "auto" or MeshLayout.load(mesh)


def test_the_demo_is_the_preset_for_this_machine():
    assert demo_config("runs/demo") == parse_config(path=run_files_folder() / "cpu.yaml") != RunConfig()


def test_the_page_of_settings_is_what_the_settings_say():
    made, page = settings_page(), Path(__file__).parents[2] / "docs/settings.md"
    assert page.read_text() == made, "run `python -m spmd_distill.config.describe > docs/settings.md`"
    assert all(f"| `{name.partition('.')[2] or name}` |" in made for name in setting_names())
    assert not re.findall(r"^\|.*\|  ?\|$", made, re.M), "a setting without a docstring below it"
