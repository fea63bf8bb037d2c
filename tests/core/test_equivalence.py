"""Trees of a whole training step, compared leaf by leaf with chex: structure, shapes, types, values, placement."""

import chex
import jax
import jax.numpy as jnp
import pytest

from spmd_distill.mappers import make_mapper
from spmd_distill.proof import _Case
from spmd_distill.sharding import MeshLayout
from spmd_distill.state import abstract_state, create_state, init_params, select_layers
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def case() -> _Case:
    with jax.enable_x64(True):
        return _Case("float64", None, 8)


@pytest.fixture(scope="module")
def one_device(case):
    with jax.enable_x64(True):
        return case.trace(MeshLayout.load("single"), "vmap", reference=True)


def test_gradients_and_parameters_are_those_of_one_device(case, one_device, monkeypatch):
    """Of one layout and mapper: `test_verify` compares the numbers of all of them."""
    chex.clear_trace_counter()
    monkeypatch.setattr(Distillation, "train_body", chex.assert_max_traces(Distillation.train_body, n=2))
    found = case.trace(MeshLayout.load("dp2_tp4"), "shard_map", reference=False)
    for (loss, grads, params), (loss_1, grads_1, params_1) in zip(found, one_device, strict=True):
        chex.assert_trees_all_equal_shapes_and_dtypes((grads, params), (grads_1, params_1))
        chex.assert_trees_all_close((loss, grads, params), (loss_1, grads_1, params_1), rtol=1e-9, atol=1e-12)
        chex.assert_tree_all_finite((grads, params))


@pytest.mark.parametrize("layout", ["dp2_tp4", "fsdp2_sp4"])
def test_a_state_is_born_where_its_layout_says(case, layout):
    mapper = make_mapper("shard_map", layout)
    run = Distillation(case.student, OnlineTeacher(case.teacher), case.objective, mapper, case.head, jnp.float64)
    state = create_state(run, case.tx, init_params(case.student, mapper, 0), seed=0)
    described = abstract_state(run, case.tx)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, described)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, described)
    embed = state.params["embed"]
    assert embed.addressable_shards[0].data.size * (4 if layout == "dp2_tp4" else 8) == embed.size
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == embed.shape]
    assert len(moments) == 2 and all(m.sharding == embed.sharding for m in moments)


def test_initial_values_do_not_depend_on_the_layout(case):
    trees = [init_params(case.student, make_mapper("shard_map", name), 3) for name in ("single", "fsdp2_sp4")]
    chex.assert_trees_all_close(*map(jax.device_get, trees), rtol=1e-12)


def test_a_student_of_some_layers_holds_exactly_those(case):
    mapper = make_mapper("shard_map", "dp2_tp4")
    params = init_params(case.teacher, mapper, 1)
    from dataclasses import replace

    from spmd_distill.models import decoder

    student = decoder(replace(case.teacher.config, layers=1))
    cut = select_layers(params, student, [1], mapper)
    chex.assert_trees_all_equal(cut["layers"], jax.tree.map(lambda x: x[1:2], params["layers"]))
    chex.assert_trees_all_equal(cut["embed"], params["embed"])
    chex.assert_trees_all_equal_shapes(cut, student.abstract)
