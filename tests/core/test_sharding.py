"""Mesh layouts: every misuse is answered by name and with the fix; every built-in file means what its drawing shows."""

import math
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
import yaml
from jax.sharding import PartitionSpec

from spmd_distill.errors import UserError
from spmd_distill.mappers import make_mapper
from spmd_distill.sharding import (
    LOGICAL_AXES,
    MeshLayout,
    layout_names,
    layouts_folder,
    named,
    sharded_axes,
    spec_axes,
)

AXES = {"data": 2, "model": 4}
RULES = {"batch": "data", "heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model"}
BUILT_IN = sorted(path.stem for path in layouts_folder().glob("*.yaml"))


def layout(axes=AXES, **rules) -> MeshLayout:
    rules = {k: v for k, v in (RULES | rules).items() if v is not None}
    return MeshLayout.from_dict({"axes": axes, "rules": rules}, "mine")


def refused(*words: str):
    """The block raises a UserError whose message holds all of these words."""
    return pytest.raises(UserError, match="".join(f"(?=.*{re.escape(word)})" for word in words))


@pytest.mark.parametrize(
    ("axes", "rules", "words"),
    [
        (AXES, {"head": "model"}, ["'head'", "Did you mean 'heads'?", *LOGICAL_AXES]),
        (AXES, {"colour": "model"}, ["unknown logical axis 'colour'", *LOGICAL_AXES]),
        (AXES, {"embed": "fsdp"}, ["embed: fsdp", "not among axes (data, model)"]),
        (AXES, {"batch": ["replica", "data"]}, ["batch: replica", "not among axes (data, model)"]),
        (AXES, {"embed": "model"}, ["'embed' cannot lie on 'model'", "may lie on data"]),
        (AXES, {"layers": "data"}, ["'layers' cannot lie on 'data'", "always whole"]),
        (AXES, {"batch": ["data", "data"]}, ["rule for 'batch'", "twice", "['data', 'data']"]),
        (AXES, {"batch": 3}, ["'batch'", "3", "was expected"]),
        (AXES, {"batch": {"data": 1}}, ["'batch'", "{'data': 1}", "was expected"]),
        (AXES, {"batch": [["data"]]}, ["'batch'", "[['data']]", "was expected"]),
        (AXES, {"batch": None}, ["no rule uses the mesh axis 'data' of size 2", "Add a rule", "size 1"]),
        ({"data": -1, "model": 1}, {"batch": None}, ["no rule uses the mesh axis 'data'"]),
        ({"replica": 2, **AXES}, {}, ["no rule uses the mesh axis 'replica' of size 2"]),
        (AXES, {"batch": None, "embed": "data"}, ["rows of the batch must lie on 'data'", "add it to the rule batch"]),
        (AXES, {"mlp": None}, ["heads, kv_heads, mlp, vocab", "the rule mlp: model is missing"]),
        (AXES, {"vocab": None}, ["the rule vocab: model is missing"]),
        (AXES, {"vocab": ["data", "model"]}, ["vocab lies on ['data', 'model']", "[model, data] in this order"]),
        (AXES, {"vocab": "data"}, ["vocab lies on ['data']", "expected model, or [model, data]"]),
        ({"data": 8}, {}, ["axis 'model' is missing", "size 1"]),
        ({"model": 8}, {}, ["axis 'data' is missing", "size 1"]),
        ({"tensor": 2, **AXES}, {}, ["unknown mesh axis 'tensor'", "replica, data, model"]),
        ({"data": -1, "model": -1}, {}, ["only one axis may have size -1"]),
        *[
            ({"data": size, "model": 4}, {}, [f"axis 'data' has size {size!r}", "positive integer", "-1"])
            for size in (0, -2, 2.0, "2", True, None)
        ],
    ],
)
def test_every_misuse_is_named_with_its_fix(axes, rules, words):
    with refused("Mesh layout 'mine'", *words):
        layout(axes, **rules)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("axes: [data, model", ["is not YAML"]),
        ("\x80", ["is not YAML"]),
        ("", ["expected the keys axes and rules", "NoneType"]),
        ("- axes", ["expected the keys axes and rules", "list"]),
        ("axes: {data: 2}", ["expected the keys axes and rules", "found axes"]),
        ("axes: {data: 2}\nrules: {}\nmesh: 3", ["expected the keys axes and rules", "found axes, rules, mesh"]),
        ("axes: [data]\nrules: {}", ["axes and rules must each be a mapping"]),
        ("axes: {data: 1, model: 1}\nrules: data", ["axes and rules must each be a mapping"]),
    ],
)
def test_a_file_that_is_no_layout_is_named(tmp_path, text, words):
    path = tmp_path / "pod.yaml"
    path.write_bytes(text.encode("latin-1"))
    with refused("pod", *words):
        MeshLayout.load(path)


def test_an_unknown_name_gets_the_nearest_one_and_the_list():
    with refused("'dp2_tp'", "Did you mean 'dp2_tp4'?", *BUILT_IN, ".yaml"):
        MeshLayout.load("dp2_tp")
    with refused("'xyz'", *BUILT_IN):
        MeshLayout.load("xyz")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with refused("pod.yaml", "No such file"):
        MeshLayout.load(tmp_path / "pod.yaml")
    with refused("cannot be read"):
        (tmp_path / "folder.yaml").mkdir()
        MeshLayout.load(tmp_path / "folder.yaml")


def test_one_array_uses_an_axis_once():
    with refused("attention.q", "'mine'", "both heads and mlp", "'model'"):
        layout().spec(("heads", "mlp"), name="attention.q")
    with refused("both batch and embed", "'data'"):
        layout(embed="data").spec(("batch", "embed"))


def test_an_uneven_dimension_is_named():
    four = layout(embed="data")
    with refused("layers.mlp.up", "dimension 2 (mlp)", "size 10", "'mine'", "4 equal shards over model"):
        four.spec(("layers", "embed", "mlp"), (3, 8, 10), "layers.mlp.up")
    with refused("dimension 0 (embed)", "size 7", "2 equal shards over data"):
        four.spec(("embed",), (7,))
    with refused("embed: dimension 0 (vocab)", "size 12", "8 equal shards over model x data"):
        layout(embed="data", vocab=["model", "data"]).spec(("vocab", "embed"), (12, 8), "embed")
    pod = layout({"replica": 2, **AXES}, batch=["replica", "data"])
    with refused("dimension 0 (batch)", "size 6", "4 equal shards over replica x data"):
        pod.spec(("batch", None), (6, 3))


@pytest.mark.parametrize("axis", ["heads", "kv_heads"])
def test_heads_that_do_not_divide_are_cut_along_embed_instead(axis):
    plain, fsdp = layout(), layout(embed="data")
    logical = ("layers", "embed", axis, "head_dim")
    assert plain.spec(logical, (2, 8, 12, 4)) == PartitionSpec(None, None, "model", None)
    assert fsdp.spec(logical, (2, 8, 12, 4)) == PartitionSpec(None, "data", "model", None)
    assert plain.spec(logical, (2, 8, 9, 4)) == PartitionSpec(None, "model", None, None)
    assert fsdp.spec(logical, (2, 8, 9, 4)) == PartitionSpec(None, ("data", "model"), None, None)
    assert plain.spec(logical, (2, 6, 9, 4)) == PartitionSpec(None, None, None, None)  # embed does not divide either
    assert fsdp.spec(logical, (2, 6, 9, 4)) == PartitionSpec(None, "data", None, None)
    assert plain.spec((axis,), (9,)) == PartitionSpec(None)


def test_a_layout_that_needs_more_devices_says_which_would_fit():
    with refused("'dp2_tp4' spans 8 devices", "but 4 were found", "single", "host_platform_device_count=8"):
        MeshLayout.load("dp2_tp4").resolve(4)
    with refused("'mine'", "do not divide the 7 devices"):
        layout({"data": -1, "model": 4}).resolve(7)
    with refused("do not divide the 2 devices"):
        layout({"data": -1, "model": 4}).mesh(jax.devices()[:2])
    for mapper in ("shard_map", "pmap"):
        with refused("spans 8 devices", "but 1 were found"):
            make_mapper(mapper, layout(), jax.devices()[:1])
    with refused("'xmap'", "shard_map, vmap, pmap"):
        make_mapper("xmap", layout())


def test_an_axis_of_size_minus_one_takes_what_the_others_leave():
    assert layout({"data": -1, "model": 4}).resolve(8).sizes == AXES
    assert layout({"data": 2, "model": -1}).resolve(8).sizes == AXES
    assert layout().resolve(16).sizes == AXES  # a layout may leave devices alone
    pods = MeshLayout.load("pod_replicas_fsdp16_tp4")
    assert pods.resolve(256).sizes == {"replica": 4, "data": 16, "model": 4}
    assert pods.resolve(256).batch_shards == 64
    assert dict(MeshLayout.load("dp").mesh().shape) == {"data": 8, "model": 1}
    assert dict(layout().mesh(jax.devices()).shape) == AXES


def test_a_users_own_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "box.yml"
    path.write_text(yaml.safe_dump({"axes": AXES, "rules": RULES}))
    for given in (path, str(path)):
        assert MeshLayout.load(given) == replace(layout(), name="box")
    assert "box" not in layout_names()


def test_names_are_the_files_and_can_be_asked_by_device_count():
    assert layout_names() == BUILT_IN
    assert {"single", "dp"} <= set(layout_names(1))
    assert "dp2_tp4" in layout_names(8) and "dp2_tp4" not in layout_names(7)


ARRAYS = {
    "tokens": ("batch", "length"),
    "embedding": ("vocab", "embed"),
    "q": ("layers", "embed", "heads", "head_dim"),
    "k": ("layers", "embed", "kv_heads", "head_dim"),
    "o": ("layers", "heads", "head_dim", "embed"),
    "gate": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
    "norm": ("layers", "act_embed"),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_array_lies_where_the_file_says(name):
    content = yaml.safe_load((layouts_folder() / f"{name}.yaml").read_text())
    loaded = MeshLayout.load(name)
    assert loaded.sizes == content["axes"] and list(loaded.sizes) == list(content["axes"])
    for axes in ARRAYS.values():
        entries = [content["rules"].get(axis) for axis in axes]
        if "vocab" in axes and content["rules"].get("vocab") == ["model", "data"]:
            entries[axes.index("embed")] = None  # one array uses an axis once: the vocabulary has it
        cut = [[a for a in ([e] if isinstance(e, str) else e or []) if content["axes"][a] != 1] for e in entries]
        assert loaded.spec(axes) == PartitionSpec(*(e[0] if len(e) == 1 else tuple(e) or None for e in cut))
    assert loaded.fsdp_axis == content["rules"].get("embed")
    assert loaded.sequence_sharded == ("length" in content["rules"])
    assert loaded.spec(()) == PartitionSpec()


def test_the_two_home_layouts_word_for_word():
    home, lean = MeshLayout.load("dp2_tp4"), MeshLayout.load("fsdp2_sp4")
    assert {k: home.spec(axes) for k, axes in ARRAYS.items()} == {
        "tokens": PartitionSpec("data", None),
        "embedding": PartitionSpec("model", None),
        "q": PartitionSpec(None, None, "model", None),
        "k": PartitionSpec(None, None, "model", None),
        "o": PartitionSpec(None, "model", None, None),
        "gate": PartitionSpec(None, None, "model"),
        "down": PartitionSpec(None, "model", None),
        "norm": PartitionSpec(None, None),
    }
    assert lean.spec(ARRAYS["tokens"]) == PartitionSpec("data", "model")
    assert lean.spec(ARRAYS["embedding"]) == PartitionSpec("model", "data")
    assert MeshLayout.load("fsdp2_tp4").spec(ARRAYS["embedding"]) == PartitionSpec(("model", "data"), None)
    assert MeshLayout.load("fsdp8").spec(ARRAYS["embedding"]) == PartitionSpec("data", None)  # model has one shard
    assert lean.spec(ARRAYS["o"]) == PartitionSpec(None, "model", None, "data")
    assert MeshLayout.load("replica2_fsdp2_tp2").spec(("batch",)) == PartitionSpec(("replica", "data"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_comment_draws_the_grid_and_counts_the_collectives(name):
    loaded = MeshLayout.load(name)
    lines = (layouts_folder() / f"{name}.yaml").read_text().splitlines()
    comment = "\n".join(line[2:] for line in lines if line.startswith("#"))
    assert "A layer" in comment or name == "single"
    shards = math.prod(loaded.sizes[a] for a in sharded_axes(loaded.spec(("embed", "mlp"))))
    for said in re.findall(r"[Pp]arameters:? (?:are )?1/(\d+) a device", comment):
        assert int(said) == shards
    if -1 in loaded.sizes.values():
        assert "..." in comment
    else:  # every row of the grid in its own brackets; tall grids are drawn with dots
        drawn = {tuple(re.findall(r"\bd(\d+)\b", row)) for row in re.findall(r"\[(.*?)\]", comment)}
        grid = np.arange(loaded.device_count).astype(str).reshape(-1, loaded.sizes["model"])
        rows = {tuple(row) for row in (grid if loaded.sizes["model"] > 1 else grid.T)}
        assert drawn == rows or ("..." in comment and drawn < rows)


@pytest.mark.parametrize("name", [n for n in layout_names(8) if MeshLayout.load(n).device_count == 8])
def test_the_mesh_is_row_major_with_the_last_axis_fastest(name):
    mesh = MeshLayout.load(name).mesh()
    assert mesh.axis_names == MeshLayout.load(name).axis_names
    assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()]


def test_specs_can_be_taken_apart():
    spec = PartitionSpec(("replica", "data"), None, "model")
    assert spec_axes(spec, 4) == (("replica", "data"), (), ("model",), ())
    assert sharded_axes(spec) == {"replica", "data", "model"}
    mesh = layout().mesh()
    placed = named(mesh, {"a": PartitionSpec("data"), "b": [PartitionSpec()]})
    assert placed["a"].spec == PartitionSpec("data") and placed["a"].mesh == mesh
    assert placed["b"][0].is_fully_replicated
