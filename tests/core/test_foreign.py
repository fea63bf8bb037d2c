"""Models that are not ours: a transformer that knows nothing of shards gives what our decoder gives."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from spmd_distill.checkpoint import Checkpoints
from spmd_distill.divergences import ForwardKL
from spmd_distill.errors import UserError
from spmd_distill.head import FusedHead, ReferenceHead
from spmd_distill.mappers import make_mapper
from spmd_distill.models import DecoderConfig, decoder
from spmd_distill.models.foreign import ForeignModel, from_apply, from_nnx
from spmd_distill.objective import Objective
from spmd_distill.sharding import MeshLayout
from spmd_distill.state import abstract_state, create_state, init_params, place_params
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch, LogitTransform, Unembedded

V, ROWS, LENGTH = 61, 4, 6
SIZES = {"vocab_size": V, "head_dim": 4, "heads": 8, "param_dtype": "float64", "init_std": 0.4}
STUDENT = DecoderConfig(width=16, layers=2, kv_heads=4, mlp=16, **SIZES)
TEACHER = DecoderConfig(width=24, layers=1, kv_heads=8, mlp=32, tied=False, **SIZES)
MIX = Objective.mix(ForwardKL(), 0.7, 2.0)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Somebody's transformer


class Layer(nnx.Module):
    """Grouped-query attention by complex numbers and a gated MLP, with names and axes of its own."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        def weight(axes: tuple[str | None, ...], *shape: int) -> nnx.Param:
            return nnx.Param(0.3 * jax.random.normal(rngs.params(), shape, c.param_dtype), out_sharding=axes)

        self.first_scale = nnx.Param(jnp.ones(c.width, c.param_dtype))
        self.second_scale = nnx.Param(jnp.ones(c.width, c.param_dtype), out_sharding=(None,))
        self.query = weight(("features", "queries", None), c.width, c.heads, c.head_dim)
        self.key = weight(("features", "keys", None), c.width, c.kv_heads, c.head_dim)
        self.value = weight(("features", "keys", None), c.width, c.kv_heads, c.head_dim)
        self.output = weight(("queries", None, "features"), c.heads, c.head_dim, c.width)
        self.gate_up = weight((None, "features", "neurons"), 2, c.width, c.mlp)
        self.down = weight(("neurons", "features"), c.mlp, c.width)

    def __call__(self, h: jax.Array, turn: jax.Array, seen: jax.Array) -> jax.Array:
        def turned(x: jax.Array) -> jax.Array:
            half = x.shape[-1] // 2
            z = (x[..., :half] + 1j * x[..., half:]) * turn[:, :, None]
            return jnp.concatenate([z.real, z.imag], -1)

        x = normed(h, self.first_scale[...])
        q, k = (turned(jnp.einsum("bld,dhc->blhc", x, w[...])) for w in (self.query, self.key))
        v = jnp.einsum("bld,dhc->blhc", x, self.value[...])
        k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
        scores = jnp.einsum("blhc,bmhc->bhlm", q, k) / np.sqrt(q.shape[-1])
        weights = jax.nn.softmax(scores, axis=-1, where=seen[:, None])
        h = h + jnp.einsum("bhlm,bmhc,hcd->bld", weights, v, self.output[...])
        gate, up = jnp.einsum("bld,idf->iblf", normed(h, self.second_scale[...]), self.gate_up[...])
        return h + (gate * jax.nn.sigmoid(gate) * up) @ self.down[...]


class Scribe(nnx.Module):
    """The whole model, up to its vocabulary."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        def table() -> nnx.Param:
            values = 0.3 * jax.random.normal(rngs.params(), (c.padded_vocab, c.width), c.param_dtype)
            return nnx.Param(values, out_sharding=("words", "features"))

        self.channels, self.words = c.head_dim, table()
        if not c.tied:
            self.answers = table()
        self.layers = nnx.List([Layer(c, rngs) for _ in range(c.layers)])
        self.last_scale = nnx.Param(jnp.ones(c.width, c.param_dtype))
        self.dropout = nnx.Dropout(0.3, deterministic=True, rngs=rngs)

    def __call__(self, batch: Batch) -> Unembedded:
        frequency = 10000.0 ** (-jnp.arange(0, self.channels, 2) / self.channels)
        seen = (batch.segments[:, :, None] == batch.segments[:, None]) & jnp.tri(batch.tokens.shape[1], dtype=bool)
        h = self.dropout(self.words[...][batch.tokens])
        for layer in self.layers:
            h = layer(h, jnp.exp(1j * batch.positions[..., None] * frequency), seen)
        answers = getattr(self, "answers", self.words)[...]
        return Unembedded(normed(h, self.last_scale[...]), answers, LogitTransform(V))


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale


RULES = {"features": "embed", "neurons": ("model",), "words": "vocab", "queries": "heads", "keys": "kv_heads"}


def scribe(config: DecoderConfig, forward: Callable[..., Any] = Scribe.__call__, **settings: Any) -> ForeignModel:
    return from_nnx(lambda rngs: Scribe(config, rngs), forward, rules=RULES, **settings)


def translated(params: Any) -> Any:
    """Our decoder's parameters (or their gradients) under the other's names."""
    ours = params["layers"]
    layers = {
        i: {
            "first_scale": ours["attention_norm"]["scale"][i],
            "second_scale": ours["mlp_norm"]["scale"][i],
            "query": ours["attention"]["q"][i],
            "key": ours["attention"]["k"][i],
            "value": ours["attention"]["v"][i],
            "output": ours["attention"]["o"][i],
            "gate_up": np.stack([ours["mlp"]["gate"][i], ours["mlp"]["up"][i]]),
            "down": ours["mlp"]["down"][i],
        }
        for i in range(len(ours["mlp"]["down"]))
    }
    tables = {"words": params["embed"]} | ({"answers": params["unembed"]} if "unembed" in params else {})
    return tables | {"layers": layers, "last_scale": params["norm"]["scale"]}


def params_of(config: DecoderConfig, seed: int) -> Any:
    return jax.device_get(jax.jit(decoder(config).init)(jax.random.key(seed)))


# ---------------------------------------------------------------------------------------------------------------------
# A step


def rows() -> Batch:
    """Two micro-batches of packed rows with masked tokens."""
    r, shape = np.random.default_rng(0), (2, ROWS, LENGTH)
    tokens = r.integers(0, V, (2, ROWS, LENGTH + 1)).astype(np.int32)
    segments = np.broadcast_to(np.r_[1, 1, 1, 1, 2, 2], shape).astype(np.int32)
    positions = np.broadcast_to(np.r_[:4, :2], shape).astype(np.int32)
    return Batch(tokens[..., :-1], tokens[..., 1:], r.random(shape) < 0.7, positions, segments)


def outcome(
    layout: str,
    mapper: str,
    models: tuple[Any, Any],
    params: tuple[Any, Any],
    head: Any = FusedHead(chunk=5),  # noqa: B008
    *,
    evaluate: bool = False,
) -> list[Any]:
    """Metrics, gradients and updated parameters of a step; before these the metrics of an evaluation, if asked for."""
    (student, teacher), mapping, tx = models, make_mapper(mapper, layout), optax.adam(0.1)
    run = Distillation(student, OnlineTeacher(teacher), MIX, mapping, head, jnp.dtype("float64"))
    teacher_params = place_params(params[1], teacher, mapping)
    state, found = create_state(run, tx, place_params(params[0], student, mapping), seed=0), []
    if evaluate:
        metrics = run.eval_step()(state.params, teacher_params, jax.tree.map(lambda x: x[0], rows()), jnp.int32(0))
        found.append({k: m.value for k, m in metrics.items()})
    state, metrics, grads = run.train_step(tx, return_gradients=True)(state, teacher_params, rows())
    return jax.device_get([*found, {k: m.value for k, m in metrics.items()}, grads, state.params])


def close(found: Any, expected: Any, bar: float = 1e-9) -> None:
    def one(path: Any, x: np.ndarray, y: np.ndarray) -> None:
        error = np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)
        assert error <= bar, f"{jax.tree_util.keystr(path)}: {error:.2g}"

    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree_util.tree_map_with_path(one, found, expected)


@pytest.fixture(scope="module")
def ours():
    """Both models' parameters, and what our decoders make of them on one device with full logits."""
    with jax.enable_x64(True):
        params = params_of(STUDENT, 0), params_of(TEACHER, 1)
        models = decoder(STUDENT), decoder(TEACHER)
        return params, outcome("single", "vmap", models, params, ReferenceHead(), evaluate=True)


CASES = [
    ("single", "shard_map", "both", {}),
    ("dp2_tp4", "shard_map", "both", {}),
    ("fsdp2_tp4", "shard_map", "both", {}),
    ("tp8", "shard_map", "both", {}),
    ("dp2_tp4", "shard_map", "teacher", {}),
    ("fsdp2_tp4", "shard_map", "student", {}),
    ("fsdp2_tp4", "shard_map", "both", {"batch_axes": "manual"}),
    ("dp2_tp4", "vmap", "both", {"batch_axes": "manual"}),
    ("fsdp2_tp4", "pmap", "both", {}),
]
EVALUATED = (("fsdp2_tp4", "both"), ("dp2_tp4", "teacher"))


@pytest.mark.parametrize(("layout", "mapper", "role", "settings"), CASES)
def test_a_step_is_that_of_our_decoder(layout, mapper, role, settings, ours):
    (params, teacher_params), (seen, metrics, grads, updated) = ours
    student, teacher = decoder(STUDENT), decoder(TEACHER)
    if role != "teacher":
        student = scribe(STUDENT, **settings)
        params, grads, updated = map(translated, (params, grads, updated))
    if role != "student":
        teacher, teacher_params = scribe(TEACHER, **settings), translated(teacher_params)
    evaluate = mapper == "shard_map" and (layout, role) in EVALUATED
    found = outcome(layout, mapper, (student, teacher), (params, teacher_params), evaluate=evaluate)
    close(found, [seen, metrics, grads, updated] if evaluate else [metrics, grads, updated])


def program(layout: str, student: Any, teacher: Any) -> Any:
    """A training step in float32 with rows of its own sizes, traced and not run."""
    mapping, tx = make_mapper("shard_map", layout), optax.sgd(0.1)
    run = Distillation(student, OnlineTeacher(teacher), MIX, mapping, FusedHead(chunk=8))

    def placed(shapes: Any, specs: Any) -> Any:
        where = mapping.shardings(specs)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)

    ids = jax.ShapeDtypeStruct((1, 10, 7), jnp.int32)
    batch = placed(Batch(ids, ids, jax.ShapeDtypeStruct(ids.shape, bool), ids, ids), run.batch_specs(1))
    teacher_params = placed(teacher.abstract, teacher.specs(mapping.layout))
    return run.train_step(tx).trace(abstract_state(run, tx), teacher_params, batch)


def test_a_device_holds_its_part_of_the_parameters_and_never_logits():
    sizes = {"vocab_size": 4096, "head_dim": 4, "heads": 4, "kv_heads": 4, "width": 16, "layers": 1}
    model = scribe(DecoderConfig(mlp=48, tied=False, **sizes))
    compiled = program("dp2_tp4", model, model).lower().compile()
    scales = 3 * 16 * 4
    whole = model.parameter_count * 4 - scales
    batch = 5 * 7 * (4 * 4 + 1)
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * (whole // 4 + scales) + batch + 8  # step, seed
    shapes = {tuple(map(int, x.split(","))) for x in re.findall(r"\[([\d,]+)\]", compiled.as_text())}
    seen = {s for s in shapes if 1024 in s or 4096 in s}
    assert {(1024, 16), (8, 1024)} <= seen  # a shard of a table, a chunk of logits
    assert not any(np.prod(s) > 1024 * 16 for s in seen)


# ---------------------------------------------------------------------------------------------------------------------
# Any function, annotated in any way


SHAPES = {"in": (V, 16), "mix": [(16, 8)], "out": (V, 8)}
PHYSICAL = {"in": P(None, ("model",)), "mix": [P("data", "model")], "out": P()}
LOGICAL = {"in": (None, "embed"), "mix": [("embed", "mlp")], "out": None}


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float64), tree, is_leaf=lambda s: isinstance(s, tuple))


def values(seed: int) -> Any:
    r = np.random.default_rng(seed)
    return jax.tree.map(lambda x: r.normal(size=x.shape), shapes_of(SHAPES))


def hidden(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """A model without attention, whose tables have no padding rows, and with constraints on activations."""
    h = jax.lax.with_sharding_constraint(params["in"][batch.tokens], P("data"))
    return jnp.tanh(jax.lax.with_sharding_constraint(h @ params["mix"][0], P("data", None, "model"))), params["out"]


def logits(params: Any, batch: Batch) -> jax.Array:
    h, unembed = hidden(params, batch)
    return jnp.einsum("bld,vd->blv", h, unembed)


def bag(apply: Callable[..., Any] = hidden, axes: Any = None, **settings: Any) -> ForeignModel:
    return from_apply(apply, shapes_of(SHAPES), axes, **{"name": "bag", **settings})


@pytest.fixture(scope="module")
def bags():
    with jax.enable_x64(True):
        return outcome("single", "vmap", (bag(), bag()), (values(0), values(1)), ReferenceHead())


ANYHOW = [
    ("dp2_tp4", "shard_map", bag(axes=PHYSICAL), bag(axes=LOGICAL), FusedHead(chunk=5)),
    ("dp2_tp4", "shard_map", bag(logits, PHYSICAL), bag(logits), FusedHead(chunk=5)),
    ("fsdp2_tp4", "shard_map", bag(axes=PHYSICAL), bag(logits, LOGICAL), FusedHead()),
    ("fsdp2_tp4", "vmap", bag(logits, LOGICAL), bag(), ReferenceHead()),
    ("replica2_fsdp2_tp2", "shard_map", bag(axes=LOGICAL), bag(vocab_rows=128), FusedHead(chunk=5)),
]


@pytest.mark.parametrize(("layout", "mapper", "student", "teacher", "head"), ANYHOW)
def test_annotations_constraints_and_logits_move_nothing(layout, mapper, student, teacher, head, bags):
    found = outcome(layout, mapper, (student, teacher), (values(0), values(1)), head)
    close(found, bags)


def test_a_bias_a_cap_a_scale_and_rows_that_are_no_tokens():
    bias = np.random.default_rng(2).normal(size=V + 3)

    def stopped(params: Any, batch: Batch) -> Unembedded:
        h, unembed = hidden(params, batch)
        return Unembedded(h, jnp.pad(unembed, [(0, 3), (0, 0)]), LogitTransform(V, 0.7, 9.0), jnp.asarray(bias))

    def finished(params: Any, batch: Batch) -> jax.Array:
        return 9 * jnp.tanh((logits(params, batch) + bias[:V]) * 0.7 / 9)

    params = values(0), values(1)
    expected = outcome("single", "vmap", (bag(finished), bag()), params, ReferenceHead())
    close(outcome("dp2_tp4", "shard_map", (bag(stopped), bag()), params), expected)


def hidden_states(layout: str, model: ForeignModel, params: Any, key: jax.Array | None) -> np.ndarray:
    mapping = make_mapper("shard_map", layout)
    batch = jax.tree.map(lambda x: x[0], rows())
    return np.asarray(jax.jit(lambda p, key: model.forward(p, batch, mapping, key).hidden)(params, key))


def test_dropout_depends_on_the_layout_only_where_shards_of_the_batch_draw_for_themselves():
    def dropped(params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        h = params["in"][batch.tokens][..., :8]
        return h if key is None else jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, 0), params["out"]

    one, auto, manual = (
        hidden_states(layout, bag(dropped, takes_key=True, batch_axes=batch_axes), values(0), jax.random.key(4)) == 0
        for layout, batch_axes in (("single", "auto"), ("dp2_tp4", "auto"), ("dp2_tp4", "manual"))
    )
    assert (one == auto).all() and 0.1 < one.mean() < 0.5
    first, second = np.split(manual, 2)
    assert (first != second).any() and 0.1 < manual.mean() < 0.5
    student, teacher = (bag(dropped, takes_key=True, axes=LOGICAL) for _ in range(2))
    metrics = outcome("dp2_tp4", "shard_map", (student, teacher), (values(0), values(0)), evaluate=True)
    assert metrics[0]["kl"] < 1e-9 and metrics[1]["kl"] > 0.1  # the student drops in training, the teacher never


# ---------------------------------------------------------------------------------------------------------------------
# Modules, states, checkpoints


class Small(nnx.Module):
    """What modules are made of besides annotated parameters: lists, dropout, statistics, layers of flax."""

    def __init__(self, rngs: nnx.Rngs):
        kernel = nnx.with_partitioning(nnx.initializers.normal(0.5), ("data", "model"))
        self.embed = nnx.Embed(V, 8, rngs=rngs, param_dtype=jnp.float64)
        self.parts = nnx.List([nnx.Linear(8, 8, kernel_init=kernel, rngs=rngs, param_dtype=jnp.float64)])
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs, param_dtype=jnp.float64)
        self.norm.mean[...] = jnp.arange(8, dtype=jnp.float32) / 8
        self.drop = nnx.Dropout(0.4, deterministic=True, rngs=rngs)


def small_forward(module: Small, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    if key is not None:
        nnx.reseed(module, default=key)
        module.drop.deterministic = False
    return module.drop(module.norm(module.parts[0](module.embed(batch.tokens)))), module.embed.embedding[...]


def test_a_built_module_and_the_function_that_builds_it_are_one_model():
    with nnx.use_eager_sharding(False):
        module = Small(nnx.Rngs(jax.random.key(3)))
    built, made = (from_nnx(m, small_forward, takes_key=True) for m in (module, Small))
    mapping = make_mapper("shard_map", "fsdp2_tp4")
    born = init_params(made, mapping, 3)
    close(place_params(module, built, mapping), born, 1e-14)
    assert born["parts"][0]["kernel"].sharding.shard_shape((8, 8)) == (4, 2)
    assert module.embed.embedding[...].is_deleted() is False and built.name == made.name == "Small"
    for key in (None, jax.random.key(4)):
        found = [hidden_states("fsdp2_tp4", model, born, key) for model in (built, made)]
        close(*found)
        assert (np.abs(found[0]).min() < 1e-9) == (key is not None)
    with pytest.raises(UserError, match="Small was given with its parameters"):
        init_params(built, mapping, 0)


def test_a_state_is_saved_and_restored_on_another_layout(tmp_path):
    model, tx = from_nnx(Small, small_forward, takes_key=True), optax.adam(0.1)

    def run_on(layout: str) -> Distillation:
        return Distillation(model, OnlineTeacher(bag()), MIX, make_mapper("shard_map", layout))

    first, second = run_on("dp2_tp4"), run_on("fsdp4_tp2")
    state = create_state(first, tx, init_params(model, first.mapper, 0), seed=1)
    with Checkpoints(tmp_path, async_=False) as checkpoints:
        checkpoints.save(7, state, {})
        restored, _ = checkpoints.restore(like=abstract_state(second, tx))
    close(jax.device_get(restored), jax.device_get(state), 0)
    assert restored.params["parts"][0]["kernel"].sharding.shard_shape((8, 8)) == (2, 4)


# ---------------------------------------------------------------------------------------------------------------------
# What does not fit


def returns(f: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: program("dp2_tp4", bag(lambda params, batch: f(*hidden(params, batch))), bag())


def annotated(axes: Any, **settings: Any) -> Callable[[], Any]:
    layout = MeshLayout.load(settings.pop("layout", "fsdp2_tp4"))
    return lambda: bag(axes={**LOGICAL, "in": axes}, **settings).specs(layout)


WRONG = {
    "no batch": (returns(lambda h, w: (h[0], w)), r"hidden states of shape \(7, 8\); .* B = 10 and L = 7"),
    "flat": (returns(lambda h, w: (h.reshape(-1, 8), w)), r"\(70, 8\); expected \[B, L, D\]"),
    "wide": (returns(lambda h, w: (h, jnp.zeros((V, 9)))), r"\(61, 9\), but .* width 8; expected \[V, 8\]\.(?! It)"),
    "turned": (returns(lambda h, w: (h, w.T)), r"\(8, 61\).*It is \[D, V\]: return its transpose"),
    "flat logits": (returns(lambda h, w: (h @ w.T).reshape(-1, V)), r"logits of shape \(70, 61\); .*\[B, L, V\]"),
    "integers": (returns(lambda h, w: jnp.argmax(h @ w.T, -1)), r"bag returned int64 \[10, 7\] as its logits"),
    "nothing": (returns(lambda h, w: None), "bag returned NoneType"),
    "three": (returns(lambda h, w: (h, w, w)), "bag returned tuple"),
    "bias": (returns(lambda h, w: Unembedded(h, w, LogitTransform(V), w[0])), r"shape \(8,\); expected \(61,\)"),
    "tokens": (returns(lambda h, w: Unembedded(h, w, LogitTransform(99))), "vocabulary of 99 tokens, but 61 rows"),
    "too few rows": (lambda: program("single", bag(vocab_rows=40), bag()), "61 rows .* and vocab_rows 40"),
    "rows that do not divide": (lambda: program("dp2_tp4", bag(vocab_rows=62), bag()), "bag: unembedding.*62"),
    "no rule": (annotated(("words", "heads")), "bag: parameter in is annotated with 'words', which no rule places"),
    "misspelt": (annotated((None, "embd")), "'embd'.*Did you mean 'embed'"),
    "rule to nowhere": (annotated((None, "x"), rules={"x": "tensor"}), "parameter in: the rule 'x': 'tensor' leads"),
    "too many axes": (annotated((None, None, "embed")), r"annotated with 3 axes.*has 2 dimensions, \(61, 16\)"),
    "does not divide": (annotated(P("data")), r"bag: parameter in: dimension 0 \(data\) has size 61"),
    "twice": (annotated(P("model", "model"), layout="single"), "mesh axis 'model'; one array can use an axis once"),
    "other tree": (lambda: bag(axes={"in": None}), "bag: axes must be a tree like params"),
    "constraint": (
        lambda: program("dp2_tp4", bag(batch_axes="manual"), bag()),
        r"bag: with batch_axes='manual', a constraint inside can name the axis model alone; .*P\('data',\)",
    ),
    "batch_axes": (lambda: bag(batch_axes="data"), "batch_axes is 'data'; expected 'auto' or 'manual'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_what_does_not_fit_is_named(mistake):
    call, message = WRONG[mistake]
    with pytest.raises(UserError, match=message):
        call()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out": None}, "Parameter out: found none, .* expects float64 .61, 8."),
        ({"more": np.zeros(3)}, "Parameter more: found float64 .3., .* expects none"),
        ({"in": np.zeros((V, 8))}, "Parameter in: found float64 .61, 8., .* expects float64 .61, 16."),
        ({"in": np.zeros((V, 16), np.float32)}, "Parameter in: found float32"),
    ],
)
def test_parameters_of_another_model_are_refused(changed, message):
    with pytest.raises(UserError, match=message):
        place_params(values(0) | changed, bag(), make_mapper("shard_map", "dp2_tp4"))


def test_an_annotation_says_where_a_parameter_lies():
    def spec(axes: Any, layout: str, rules: Any = None) -> Any:
        shapes = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)
        return from_apply(hidden, shapes, axes, rules=rules).specs(MeshLayout.load(layout))

    assert spec(None, "fsdp2_tp4") == P(None, None, None)
    assert spec(("embed", "mlp"), "fsdp2_tp4") == P("data", "model", None)
    assert spec(("embed", "mlp"), "dp2_tp4") == P(None, "model", None)
    assert spec(("vocab",), "fsdp2_tp4") == P(("model", "data"), None, None)
    assert spec(P(None, ("data", "model")), "dp2_tp4") == P(None, ("data", "model"), None)
    assert spec(P("replica", "model"), "fsdp8") == P(None, None, None)  # an axis it lacks, an axis of one shard
    assert spec(("a", "b", "c"), "dp2_tp4", {"a": "mlp", "b": None, "c": ("data",)}) == P("model", None, "data")
    assert spec((("a", "b"),), "replica2_fsdp2_tp2", {"a": "batch", "b": "mlp"}) == P(
        ("replica", "data", "model"), None, None
    )
