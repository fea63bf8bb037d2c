"""Collectives against numpy: values and gradients are what the unsharded computation gives, under every mapper."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_distill.collectives import (
    FlatAxis,
    all_gather,
    axis_size,
    collect_from,
    copy_to,
    gather_from,
    gather_param,
    pmax,
    psum,
    psum_scatter,
    reduce_from,
    same_on,
    scatter_to,
    shard_index,
    split_to,
    to_varying,
    vary_like,
)
from spmd_distill.mappers import MAPPERS, make_mapper
from spmd_distill.mappers.stacking import stack, unstack
from spmd_distill.sharding import MeshLayout, sharded_axes

LAYOUTS = ["dp2_tp4", "dp4_tp2", "replica2_fsdp2_tp2"]
PRODUCT = list(itertools.product(MAPPERS, LAYOUTS))
K, N = 4, 8


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def grid_of(layout: MeshLayout) -> tuple[int, int, int]:
    return layout.sizes.get("replica", 1), layout.sizes["data"], layout.sizes["model"]


def shard_values(layout: MeshLayout) -> dict[str, np.ndarray]:
    """What every shard of the grid [replica, data, model] holds."""
    r, grid = np.random.default_rng(0), grid_of(layout)
    _, d, m = grid
    return {
        "same": r.normal(size=(*grid[:2], N)),  # the same on every shard of model
        "mine": r.normal(size=(*grid, K, N)),
        "wide": r.normal(size=(*grid, K, N * m)),
        "g_same": r.normal(size=(*grid[:2], K, N)),
        "g_same_wide": r.normal(size=(*grid[:2], K, N * m)),
        "g_mine": r.normal(size=(*grid, N)),
        # float32 would round the sum of these
        "g_data": r.choice([1e8, -1e8, 1.0], size=(*grid, K * d, N)).astype(np.float32),
        "g_data_model": r.choice([1e8, -1e8, 1.0], size=(*grid, K * d * m, N)).astype(np.float32),
    }


def body(layout, types, same, mine, wide, g_same, g_same_wide, g_mine, g_data, g_data_model):
    """Every collective on one shard, and what its transpose makes of a cotangent."""
    batch, m, every = layout.batch_axes, "model", (*layout.batch_axes, "model")
    out = {}

    def record(name, f, x, g=None):
        value, pullback = jax.vjp(f, x)
        out[name] = value
        if g is not None:
            out[f"{name}, transposed"] = pullback(g)[0]

    record("copy_to", lambda x: copy_to(x, m), same, g_mine)
    record("reduce_from", lambda x: reduce_from(x, m), mine, g_same)
    record("reduce_from all", lambda x: reduce_from(x, every), mine, psum(g_same, batch))
    record("gather_from", lambda x: gather_from(x, m, 1), mine, wide)
    record("scatter_to", lambda x: scatter_to(x, m, 1), wide, mine)
    record("collect_from", lambda x: collect_from(x, m, 1), mine, g_same_wide)
    record("split_to", lambda x: split_to(x, m, 1), g_same_wide, mine)
    record("gather_param", lambda x: gather_param(x, "data", 0, jnp.float32), mine, g_data)
    record("gather_param over two", lambda x: gather_param(x, ("data", m), 0, jnp.float32), mine, g_data_model)
    record("same_on model", lambda x: same_on(x, m), mine)
    record("same_on all", lambda x: same_on(x, every), mine)
    out["pmax"] = pmax(mine, m)
    out["psum of a tree"] = psum({"a": mine, "b": [mine]}, (m, *batch))["b"][0]
    out["psum over nothing"] = psum(mine, ())
    out["stacked"] = all_gather(mine, m, tiled=False)
    out["psum_scatter"] = psum_scatter(wide, m, dim=1)
    out["vary_like"] = vary_like(jnp.ones(N), mine)
    out["vary_like two"] = vary_like(jnp.ones(N), same, {"a": g_same})
    out["marked twice"] = to_varying(to_varying({"a": same}, m), every)["a"]
    out["index"] = jnp.stack([shard_index(a) for a in ((), batch, m, every, every[::-1])])
    out["sizes"] = jnp.asarray([axis_size(a) for a in ((), batch, m, every)])
    if jax.sharding.get_abstract_mesh().manual_axes:
        types.update({k: set(jax.typeof(x).manual_axis_type.varying) for k, x in out.items()})
    return jax.tree.map(lambda x: to_varying(x, every)[None, None], out)


def expected_values(same, mine, wide, g_same, g_same_wide, g_mine, g_data, g_data_model) -> dict[str, np.ndarray]:
    grid = (r, d, m) = mine.shape[:3]

    def on_model(x):
        """[replica, data, ...], the same on every shard of model."""
        return np.broadcast_to(x[:, :, None], (r, d, m, *x.shape[2:]))

    def on_all(x):
        return np.broadcast_to(x, (*grid, *x.shape))

    def pieces(x, axis):
        """Cut ``axis`` (of the local array) into one piece a shard of model: [..., model, ...] in front."""
        return np.stack(np.split(x, m, axis=axis), 2)

    joined = on_model(np.concatenate([mine[:, :, i] for i in range(m)], axis=-1))
    narrow = np.float32(mine)
    by_data = np.concatenate([narrow[:, i] for i in range(d)], axis=-2)[:, None]
    by_both = np.concatenate([narrow[:, i, j] for i in range(d) for j in range(m)], axis=-2)[:, None, None]
    sum_data = np.stack(np.split(np.float64(g_data).sum(1), d, axis=-2), 1)  # [replica, data, model, K, N]
    sum_both = np.float64(g_data_model).sum((1, 2)).reshape(r, d, m, K, N)
    total = mine.sum((0, 1, 2))
    rank = np.arange(r * d * m).reshape(grid)
    i_batch, i_model = rank // m, rank % m
    return {
        "copy_to": on_model(same),
        "copy_to, transposed": on_model(g_mine.sum(2)),
        "reduce_from": on_model(mine.sum(2)),
        "reduce_from, transposed": on_model(g_same),
        "reduce_from all": on_all(total),
        "reduce_from all, transposed": on_all(g_same.sum((0, 1))),
        "gather_from": joined,
        "gather_from, transposed": pieces(wide.sum(2), -1),
        "scatter_to": pieces(wide.sum(2), -1),
        "scatter_to, transposed": joined,
        "collect_from": joined,
        "collect_from, transposed": pieces(g_same_wide, -1),
        "split_to": pieces(g_same_wide, -1),
        "split_to, transposed": joined,
        "gather_param": np.broadcast_to(by_data, (*grid, K * d, N)),
        "gather_param, transposed": sum_data,
        "gather_param over two": np.broadcast_to(by_both, (*grid, K * d * m, N)),
        "gather_param over two, transposed": sum_both,
        "same_on model": on_model(mine[:, :, 0]),
        "same_on all": on_all(mine[0, 0, 0]),
        "pmax": on_model(mine.max(2)),
        "psum of a tree": on_all(total),
        "psum over nothing": mine,
        "stacked": on_model(mine),
        "psum_scatter": pieces(wide.sum(2), -1),
        "vary_like": np.ones((*grid, N)),
        "vary_like two": np.ones((*grid, N)),
        "marked twice": on_model(same),
        "index": np.stack([0 * rank, i_batch, i_model, rank, i_model * r * d + _reversed(i_batch, r, d)], -1),
        "sizes": on_all(np.array([1, r * d, m, r * d * m])),
    }


def _reversed(rank: np.ndarray, r: int, d: int) -> np.ndarray:
    return rank % d * r + rank // d


def expected_types(layout: MeshLayout) -> dict[str, set[str]]:
    """What `shard_map` must know: which values are equal along an axis although they came out of different ones."""
    batch, every = set(layout.batch_axes), {*layout.batch_axes, "model"}
    fewer = {
        "copy_to, transposed": batch,
        "reduce_from": batch,
        "reduce_from all": set(),
        "collect_from": batch,
        "split_to, transposed": batch,
        "same_on model": batch,
        "same_on all": set(),
        "pmax": batch,
        "psum of a tree": set(),
        "vary_like two": batch,
        "sizes": set(),
    }
    names = expected_values(**shard_values(layout))
    return {name: fewer.get(name, every) for name in names}


@pytest.mark.parametrize(("mapper_name", "layout_name"), PRODUCT)
def test_values_and_transposes_are_those_of_numpy(mapper_name, layout_name):
    layout = MeshLayout.load(layout_name)
    values = shard_values(layout)
    grid, types = grid_of(layout), {}
    in_specs, arrays = [], []
    for name, x in values.items():
        lead = 2 if "same" in name else 3
        in_specs.append(layout.spec(("batch", "vocab")[: lead - 1]))
        arrays.append(x.reshape(grid[0] * grid[1], *x.shape[2:]))
    out_spec = layout.spec(("batch", "vocab"))

    def on_shard(*args):
        given = (x[0] if "same" in k else x[0, 0] for k, x in zip(values, args, strict=True))
        return body(layout, types, *given)

    run = jax.jit(make_mapper(mapper_name, layout).map(on_shard, tuple(in_specs), out_spec))
    found, expected = run(*arrays), expected_values(**values)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        x = np.asarray(x).reshape(*grid, *x.shape[2:])
        np.testing.assert_allclose(x, expected[name], rtol=1e-13, atol=1e-13, err_msg=name)
        if "same_on" in name or "gather" in name:
            np.testing.assert_array_equal(x, expected[name], name)
    assert found["gather_param"].dtype == jnp.float32
    assert found["gather_param, transposed"].dtype == jnp.float64
    if mapper_name == "shard_map":
        assert types == expected_types(layout)


# A tensor-parallel MLP of two layers with biases, as the models have it


def mlp_arrays() -> dict[str, np.ndarray]:
    r = np.random.default_rng(1)
    shapes = {"x": (16, 6), "y": (16, 6), "w1": (6, 8), "b1": (8,), "w2": (8, 6), "b2": (6,)}
    shapes |= {"v1": (6, 8), "c1": (8,), "v2": (8, 6), "c2": (6,)}
    return {k: r.normal(size=s) for k, s in shapes.items()}


MLP_AXES = {
    "x": ("batch", None), "y": ("batch", None),
    "w1": ("embed", "mlp"), "b1": ("mlp",), "w2": ("mlp", "embed"), "b2": (None,),
    "v1": ("embed", "mlp"), "c1": ("mlp",), "v2": ("mlp", "embed"), "c2": (None,),
}  # fmt: skip


def mlp_loss(p, enter, leave, whole):
    """The sum over rows of a squared error; ``enter`` and ``leave`` a parallel block, ``whole`` gathers a weight."""
    h = leave(jax.nn.gelu(enter(p["x"]) @ whole(p["w1"], 0) + p["b1"]) @ whole(p["w2"], 1)) + p["b2"]
    h = h + leave(jnp.tanh(enter(h) @ whole(p["v1"], 0) + p["c1"]) @ whole(p["v2"], 1)) + p["c2"]
    return jnp.sum(jnp.square(h - p["y"]))


@pytest.mark.parametrize(("mapper_name", "layout_name"), PRODUCT)
def test_a_tensor_parallel_mlp_has_the_gradients_of_the_plain_one(mapper_name, layout_name):
    layout, arrays = MeshLayout.load(layout_name), mlp_arrays()
    specs = {k: layout.spec(axes, arrays[k].shape) for k, axes in MLP_AXES.items()}
    batch, fsdp = layout.batch_axes, layout.fsdp_axis

    def on_shard(p):
        missing = {k: tuple(a for a in batch if a not in sharded_axes(spec)) for k, spec in specs.items()}
        p = {k: to_varying(x, missing[k]) for k, x in p.items()}
        loss, grads = jax.value_and_grad(mlp_loss)(
            p,
            lambda x: copy_to(x, "model"),
            lambda x: reduce_from(x, "model"),
            lambda w, dim: gather_param(w, fsdp, dim, w.dtype) if fsdp else w,
        )
        return psum(loss, batch), {k: psum(g, missing[k]) for k, g in grads.items()}

    run = jax.jit(make_mapper(mapper_name, layout).map(on_shard, (specs,), (P(), specs)))
    loss, grads = run(arrays)
    plain_loss, plain_grads = jax.value_and_grad(mlp_loss)(arrays, *(lambda x, *_: x,) * 3)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-12)
    for name, g in plain_grads.items():
        np.testing.assert_allclose(grads[name], g, rtol=1e-11, atol=1e-11, err_msg=name)


# Stacking: what vmap and pmap do where shard_map cuts by itself

ODD_SPECS = [
    ((), P()),
    ((8,), P("model")),
    ((3, 8), P(None, ("replica", "data", "model"))),
    ((8, 3), P(("model", "replica"))),
    ((4, 6, 2), P(("data", "replica"), None, "model")),
    ((2, 4, 6), P("model", ("replica", "data"), None)),
    ((4, 2), P(("replica",), "data")),
    ((2, 8, 5), P(None, ("data", "model"))),
]


@pytest.mark.parametrize(("shape", "spec"), ODD_SPECS, ids=[str(spec) for _, spec in ODD_SPECS])
def test_stacking_cuts_where_jax_cuts_and_joins_again(shape, spec):
    layout = MeshLayout.load("replica2_fsdp2_tp2")
    mesh, x = layout.mesh(), np.arange(np.prod(shape, dtype=int)).reshape(shape)
    stacked = stack(layout, jnp.asarray(x), spec)
    np.testing.assert_array_equal(unstack(layout, stacked, spec), x)
    in_front = [a for a in mesh.axis_names if a in str(spec)]
    for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items():
        place = dict(zip(mesh.axis_names, np.argwhere(mesh.devices == device)[0], strict=True))
        np.testing.assert_array_equal(stacked[tuple(place[a] for a in in_front)], x[index])
    tree = {"a": x, "b": [x + 1, {"c": x + 2}]}
    for mapper in MAPPERS:
        same = make_mapper(mapper, layout).map(lambda t: jax.tree.map(lambda v: 2 * v, t), (spec,), spec)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(same)(tree), jax.tree.map(lambda v: 2 * v, tree))


def test_a_flat_axis_knows_its_groups():
    flat = FlatAxis(("replica", "data", "model"), (2, 2, 2))
    assert flat.groups(("model",)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert flat.groups(("data",)) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert flat.groups(("replica", "model")) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert flat.groups(("model", "data", "replica")) is None
    assert FlatAxis(("data", "model"), (8, 1)).groups(("data",)) is None
    assert flat.name != FlatAxis(("replica", "data", "model"), (2, 4, 1)).name
