"""The proof itself: green on every layout and mapper, red when a collective is broken, the same as JSON."""

import functools
import inspect
import json
from dataclasses import replace

import jax
import pytest

from spmd_distill import collectives, sharding
from spmd_distill.cli import main
from spmd_distill.errors import UserError
from spmd_distill.mappers import MAPPERS
from spmd_distill.proof import BARS, ROWS, _Case, fitting_layouts, verify


@pytest.fixture(autouse=True)
def _float64_does_not_stay():
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("mapper", MAPPERS)
def test_every_layout_gives_the_result_of_one_device_in_float64(mapper):
    with jax.enable_x64(True):
        report = verify(mappers=[mapper])
    assert [(r["layout"], r["mapper"]) for r in report["results"]] == [(name, mapper) for name in fitting_layouts()]
    assert [r for r in report["results"] if not r["ok"]] == []
    assert report["ok"] and max(report["worst"].values()) < 1e-9


def test_by_default_every_mapper_and_layout_is_proved():
    assert inspect.signature(verify).parameters["mappers"].default == tuple(MAPPERS)
    assert {"single", "dp2_tp4", "dp4_tp2", "dp8", "tp8", "fsdp8", "fsdp2_tp4", "fsdp4_tp2"} <= set(fitting_layouts())


def test_float32_and_json_through_the_command(capsys):
    assert main(["verify", "--json", "--dtype", "float32", "--layouts", "fsdp2_sp4", "--mappers", "shard_map"]) == 0
    report = json.loads(capsys.readouterr().out)
    (result,) = report["results"]
    assert set(result) == {"layout", "mapper", "head", "dtype", "loss", "grad", "param", "ok"}
    assert (result["layout"], result["mapper"], result["dtype"]) == ("fsdp2_sp4", "shard_map", "float32")
    assert report["ok"] and set(report["worst"]) == {"loss", "grad", "param"}
    assert 0 < report["worst"]["grad"] <= BARS["float32"]


def test_bfloat16_is_held_to_its_loss():
    report = verify(["dp2_tp4"], ["shard_map"], "bfloat16")
    assert report["ok"] and 1e-7 < report["worst"]["loss"] < BARS["bfloat16"]


def broken_copy_to(axes, _, g):
    """The mistake everybody makes once: the backward pass of a copy is not summed."""
    return (g if axes == "model" else collectives.psum(g, axes),)


def broken_shard_index(axes):
    """Every batch shard believes to be the first: dropout masks repeat."""
    return collectives.axis_index("model") * 0


BROKEN = {
    "copy_to without its psum": lambda patch: patch.setattr(collectives.copy_to, "bwd", broken_copy_to, raising=True),
    "psum that doubles": lambda patch: patch.setattr(
        "spmd_distill.head.fused.psum", lambda x, axes: collectives.psum(x, axes) * 2
    ),
    "dropout that forgets the shard": lambda patch: patch.setattr(
        "spmd_distill.models.base.shard_index", broken_shard_index
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_collective_turns_it_red(name, capsys, monkeypatch):
    """One device alone is traced once: what is broken does nothing there."""
    trace = _Case.trace
    monkeypatch.setattr(
        _Case, "trace", lambda self, *how, **kind: one_device(trace) if kind["reference"] else trace(self, *how, **kind)
    )
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        one_device(trace)
        BROKEN[name](patch)
        jax.clear_caches()
        code = main(["verify", "--layouts", "dp2_tp4", "--mappers", "vmap"])
    jax.clear_caches()
    assert code == 1
    assert "DIFFERS" in capsys.readouterr().out


@functools.cache
def one_device(trace):
    return trace(_Case("float64", None, ROWS), sharding.MeshLayout.load("single"), "vmap", reference=True)


def test_what_does_not_exist_is_named():
    with pytest.raises(UserError, match="Unknown mapper 'xmap'"):
        verify(["dp2_tp4"], ["xmap"])
    with pytest.raises(UserError, match="Did you mean 'dp2_tp4'"):
        verify(["dp2_tp5"])


def test_a_users_own_layout_and_run_file(tmp_path, capsys):
    layout = tmp_path / "mine.yaml"
    layout.write_text(
        "axes: {model: 2, data: 2}\nrules: {batch: data, heads: model, kv_heads: model, mlp: model, vocab: model}\n"
    )
    assert sharding.MeshLayout.load(layout).axis_names == ("model", "data")
    assert main(["verify", "--dtype", "float32", "--layouts", str(layout), "--mappers", "shard_map"]) == 0
    assert "mine" in capsys.readouterr().out


def test_a_run_files_own_models_are_proved(tmp_path, capsys):
    import sys
    from pathlib import Path

    import yaml

    sys.path.insert(0, str(Path(__file__).parents[1] / "run"))
    from tiny import tiny_run

    from spmd_distill.config import to_dict

    config = tiny_run(tmp_path)
    config = replace(config, objective=replace(config.objective, temperature=3.0))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(config)))
    arguments = ["verify", "--json", "--dtype", "float32", "--mappers", "shard_map"]
    assert main([*arguments, "--config", str(tmp_path / "run.yaml")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["layout"] for r in report["results"]] == ["dp2_tp4"]
    assert not (tmp_path / "run").exists()
