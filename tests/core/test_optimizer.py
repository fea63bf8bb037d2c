"""Optimizers by name, on every kind of layout; what is frozen, cut, skipped, scaled and averaged around them."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_step import MIX, STUDENT, TEACHER, documents, micro, params_of

from spmd_distill.config import OptimizerConfig, PrecisionConfig
from spmd_distill.errors import UserError
from spmd_distill.head import FusedHead, ReferenceHead
from spmd_distill.mappers import make_mapper
from spmd_distill.models import decoder
from spmd_distill.optimizer import UpdateRule, build_rule, build_schedule
from spmd_distill.optimizer.moments import held_in
from spmd_distill.optimizer.named import optimizer_names
from spmd_distill.optimizer.paths import only
from spmd_distill.state import compile_train_step, create_state, place_params
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher

STEPS = 2
BATCH = micro(jax.tree.map(lambda x: np.concatenate([x, x[::-1]]), documents()), 2)
with jax.enable_x64(True):
    MODEL = decoder(replace(STUDENT, layers=2))
    PARAMS = params_of(MODEL.config)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def rule_of(precision: PrecisionConfig | None = None, **settings: Any) -> UpdateRule:
    config = OptimizerConfig(**{"learning_rate": 1e-2, "warmup_steps": 1, "eps": None, **settings})
    return build_rule(config, precision or PrecisionConfig(), build_schedule(config, 10), MODEL)


def run_on(layout: str, mapper: str, head: Any = FusedHead(chunk=5), **types: Any) -> Distillation:  # noqa: B008
    mapping = make_mapper(mapper, layout)
    return Distillation(MODEL, OnlineTeacher(decoder(TEACHER)), MIX, mapping, head, jnp.dtype("float64"), **types)


def trace(rule: UpdateRule, layout: str = "single", mapper: str = "vmap", *, steps: int = STEPS, **how: Any) -> Any:
    """The states after each of some steps, as numpy, and what is evaluated of the last; the metrics of each."""
    run = run_on(layout, mapper, **how)
    state = create_state(run, rule, place_params(PARAMS, MODEL, run.mapper), 7)
    step, seen, said = run.train_step(rule), [], []
    for _ in range(steps):
        state, metrics = step(state, params_of(TEACHER, 1), BATCH)
        seen.append(jax.device_get(state))
        said.append({k: float(m.value) for k, m in metrics.items()})
    return seen, jax.device_get(run.evaluated_params(rule)(state)), said


def close(found: Any, wanted: Any, bar: float) -> None:
    def one(path: Any, x: Any, y: Any) -> None:
        error = np.abs(np.asarray(x, np.float64) - y).max() / max(np.abs(y).max(), 1e-30)
        assert error <= bar, f"{jax.tree_util.keystr(path)}: {error:.2g}"

    jax.tree_util.tree_map_with_path(one, found, wanted)


# Every optimizer, on every kind of layout

BY_NAME = {
    "adamw": {"eps": 1e-4},  # with a small one Adam turns rounding of tiny gradients into whole steps
    "lion": {"b2": 0.99},
    "muon": {"options": {"ns_steps": 3}},
    "adafactor": {"options": {"min_dim_size_to_factor": 4}},
    "schedule_free_adamw": {"eps": 1e-4},
    "sgd": {"options": {"momentum": 0.9}},
    "lamb": {"eps": 1e-4},
    "adam, everything around it": {
        "name": "adam", "eps": 1e-4, "ema": 0.9, "shard_state": True, "freeze": ("layers.mlp.*",), "offload": True,
    },
}  # fmt: skip
PLACES = (("dp2_tp4", "shard_map"), ("fsdp2_tp4", "shard_map"), ("dp8", "pmap"), ("dp4_tp2", "vmap"))
PLACES_OF = {
    "adamw": (PLACES[0], *PLACES[2:]), "lion": PLACES[:1], "sgd": PLACES[1:2], "lamb": PLACES[2:3],
    "adafactor": PLACES[:2],
}  # fmt: skip


def named(name: str) -> UpdateRule:
    return rule_of(**{"name": name, **BY_NAME[name]})


@cache
def gradients_on_one_device() -> Any:
    """One program for all optimizers, with full logits: parameters -> (loss, gradients)."""
    run, still = run_on("single", "vmap", ReferenceHead()), optax.sgd(0.0)
    step = run.train_step(still, return_gradients=True)

    def call(params: Any) -> tuple[Any, Any]:
        state = create_state(run, still, place_params(jax.device_get(params), MODEL, run.mapper), 7)
        _, metrics, grads = step(state, params_of(TEACHER, 1), BATCH)
        return metrics["loss"].value, grads

    return call


@cache
def on_one_device(name: str) -> Any:
    rule, seen = replace(named(name), shard_state=False, offload=False), []
    state, apply = jax.jit(rule.start)(PARAMS, 7), jax.jit(rule.apply)
    for _ in range(STEPS):
        loss, grads = gradients_on_one_device()(state.params)
        state = apply(state, only(rule.trained, grads), True, loss)
        seen.append(jax.device_get(state))
    return seen, jax.device_get(jax.jit(rule.evaluated)(state))


@pytest.mark.parametrize(
    ("name", "layout", "mapper"),
    [(name, *place) for name in BY_NAME for place in PLACES_OF.get(name, (PLACES[0], PLACES[2]))],
)
def test_an_optimizer_by_name_does_on_any_layout_what_it_does_on_one_device(name, layout, mapper):
    states, evaluated, _ = trace(named(name), layout, mapper)
    wanted = on_one_device(name)
    for found, expected in zip(states, wanted[0], strict=True):
        close(found, expected, 1e-9)
    close(evaluated, wanted[1], 1e-9)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), states[-1].params, PARAMS)
    frozen = moved["layers"].pop("mlp") if "around" in name else {}
    assert all(m > 0 for m in jax.tree.leaves(moved)) and not any(jax.tree.leaves(frozen))


def test_every_name_of_optax_makes_an_optimizer():
    for name in optimizer_names():
        options = {"noisy_sgd": {"eta": 0.01, "gamma": 0.5, "key": 0}}.get(name, {})
        rule = rule_of(name=name, options=options)
        state = jax.eval_shape(lambda p, rule=rule: rule.start(p, 0), MODEL.abstract)
        new = jax.eval_shape(lambda s, rule=rule: rule.apply(s, s.params, jnp.bool_(1), jnp.float64(1)), state)
        shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
        assert shapes(new) == shapes(state), name


def test_muon_orthogonalises_the_matrix_of_each_layer():
    """Against Newton and Schulz's iteration on one matrix at a time, in numpy."""
    options = {"ns_steps": 4, "beta": 0.8, "nesterov": False}
    rule = rule_of(name="muon", options=options, clip_norm=None, weight_decay=0.0, schedule="constant", warmup_steps=0)
    r = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: r.normal(size=x.shape), PARAMS)
    after = jax.device_get(jax.jit(rule.apply)(rule.start(PARAMS, 0), grads, True, jnp.float64(0))).params

    def step(g: np.ndarray) -> np.ndarray:
        x = g / np.linalg.norm(g)
        x = x.T if g.shape[0] > g.shape[1] else x
        for _ in range(4):
            a = x @ x.T
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        x = x.T if g.shape[0] > g.shape[1] else x
        return -1e-2 * max(1, g.shape[1] / g.shape[0]) ** 0.5 * x

    layers, given = PARAMS["layers"], grads["layers"]
    attention = {"q": 1, "k": 1, "v": 1, "o": -1}
    for room, name, ends in [("attention", k, e) for k, e in attention.items()] + [
        ("mlp", k, 1) for k in ("gate", "down")
    ]:
        for layer in range(2):
            g = given[room][name][layer]
            g2 = g.reshape(g.shape[0], -1) if ends == 1 else g.reshape(-1, g.shape[-1])
            moved = after["layers"][room][name][layer] - layers[room][name][layer]
            np.testing.assert_allclose(moved.reshape(g2.shape), step(g2), rtol=1e-6, atol=1e-9)
    adam = -1e-2 * np.sign(grads["embed"])  # the first step of Adam
    np.testing.assert_allclose(after["embed"] - PARAMS["embed"], adam, rtol=1e-4)


# Loss scale


def scaled(**settings: Any) -> UpdateRule:
    return rule_of(PrecisionConfig(**settings), name="sgd", options={"momentum": 0.9})


@pytest.mark.parametrize(
    ("layout", "mapper", "head", "scales"),
    [
        ("dp2_tp4", "shard_map", FusedHead(chunk=5), (128.0, "1/128", "dynamic")),
        ("fsdp4_tp2", "pmap", ReferenceHead(), ("dynamic",)),
    ],
    ids=["fused", "reference"],
)
def test_a_scaled_step_is_the_step(layout, mapper, head, scales):
    plain = trace(scaled(), layout, mapper, head=head)
    for given in scales:
        found = trace(scaled(loss_scale=given), layout, mapper, head=head)
        for x, y in zip(found[0], plain[0], strict=True):
            close((x.params, x.opt_state), (y.params, y.opt_state), 1e-12)
        for x, y in zip(found[2], plain[2], strict=True):
            assert x.pop("loss_scale") == {128.0: 128, "1/128": 1 / 128, "dynamic": 2**15}[given]
            close(x, y, 1e-12)


def test_a_dynamic_scale_halves_with_an_overflow_and_doubles_after_good_steps():
    rule = scaled(loss_scale="dynamic", loss_scale_window=2)
    state, apply = rule.start(PARAMS, 0), jax.jit(rule.apply)
    grads, seen = jax.tree.map(np.ones_like, PARAMS), []
    for ok in (True, False, True, True, True, False):
        before = state
        state = apply(state, grads, ok, 1.0)
        seen.append((float(state.loss_scale.scale) / 2**15, int(state.loss_scale.good)))
        same = jax.tree.map(np.array_equal, (before.params, before.opt_state), (state.params, state.opt_state))
        assert all(jax.tree.leaves(same)) != ok
    assert seen == [(1, 1), (0.5, 0), (0.5, 1), (1, 0), (1, 1), (0.5, 0)]
    assert int(state.step) == 6


def test_float16_computes_behind_a_dynamic_scale():
    """Gradients of a mean over many tokens are below what float16 has; with the scale, they are those of float32."""
    found, rules = {}, {scale: scaled(loss_scale=scale) for scale in (None, "dynamic")}
    weights, taught = (jax.tree.map(np.float32, x) for x in (PARAMS, params_of(TEACHER, 1)))
    with jax.enable_x64(False):
        single = decoder(replace(MODEL.config, param_dtype="float32"))
        teacher = OnlineTeacher(decoder(replace(TEACHER, param_dtype="float32")))
        wide = micro(documents(), 1)
        many = jax.tree.map(lambda x: np.tile(x, (1, 4096, 1)), wide)
        for kind, scale in (("float32", None), ("float16", None), ("float16", "dynamic")):
            mapping = make_mapper("vmap", "single")
            run = Distillation(single, teacher, MIX, mapping, FusedHead(chunk=512), jnp.dtype(kind))
            rule = rules[scale]
            state = create_state(run, rule, jax.tree.map(jnp.array, weights), 0)
            _, metrics, grads = run.train_step(rule, return_gradients=True)(state, taught, many)
            assert float(metrics["skipped"].value) == 0
            found[kind, scale] = jax.device_get(grads)

    def off(key: Any) -> float:
        norm = lambda tree: np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree)))  # noqa: E731
        wanted = found["float32", None]
        return norm(jax.tree.map(np.subtract, found[key], wanted)) / norm(wanted)

    assert off(("float16", "dynamic")) < 0.01 < 5 * off(("float16", "dynamic")) < off(("float16", None))


# Frozen parameters, moving average, cut state


def compiled(rule: UpdateRule, layout: str = "dp8", **types: Any) -> Any:
    return compile_train_step(run_on(layout, "shard_map", **types), rule, BATCH)


def test_what_is_frozen_costs_nothing_and_stays():
    free, frozen = rule_of(eps=1e-4), rule_of(eps=1e-4, freeze=("embed", "layers.*norm*"), weight_decay=0.5)
    assert compiled(frozen).cost["flops"] < 0.9 * compiled(free).cost["flops"]
    states, _, _ = trace(frozen, "dp2_tp4", "shard_map")
    last = states[-1]
    np.testing.assert_array_equal(last.params["embed"], PARAMS["embed"])
    np.testing.assert_array_equal(last.params["layers"]["mlp_norm"]["scale"], PARAMS["layers"]["mlp_norm"]["scale"])
    assert (last.params["norm"]["scale"] != PARAMS["norm"]["scale"]).any()
    held = [x.size for x in jax.tree.leaves(last.opt_state)]
    trained = sum(x.size for x in jax.tree.leaves(only(frozen.trained, PARAMS)))
    assert sum(held) == 2 * trained + sum(n == 1 for n in held)
    # With the same gradients, those of the others are what they are without.
    assert jax.tree.structure(only(frozen.trained, PARAMS)) != jax.tree.structure(PARAMS)


def test_the_moving_average_is_that_of_numpy():
    rule = rule_of(eps=1e-4, ema=0.6, freeze=("norm.*",))
    states, evaluated, _ = trace(rule, steps=5)
    wanted = jax.tree.map(np.asarray, PARAMS)
    for n, state in enumerate(states, 1):
        d = min(0.6, (1 + n) / (10 + n))
        wanted = jax.tree.map(lambda e, p, d=d: d * e + (1 - d) * p, wanted, state.params)
        close(only(rule.trained, wanted), state.ema, 1e-6)  # d is a float32
    close(evaluated, wanted, 1e-6)


def test_state_cut_over_the_batch_axes_takes_its_part():
    """Two moments and an average of all parameters, on eight devices: from the compiled program's arguments."""
    plain, cut = (compiled(rule_of(eps=1e-4, ema=0.9, shard_state=on)).memory for on in (False, True))
    sizes = [x.size for x in jax.tree.leaves(PARAMS)]
    assert all(n % 8 == 0 for n in sizes)
    assert plain.arguments - cut.arguments == 3 * 8 * sum(sizes) * 7 // 8


def test_state_in_fewer_bits_takes_its_bytes():
    wide = compiled(rule_of(eps=1e-4), "single").memory.arguments
    half = compiled(rule_of(eps=1e-4, state="bfloat16"), "single").memory.arguments
    assert wide - half == 2 * (8 - 2) * sum(x.size for x in jax.tree.leaves(PARAMS)) - 4


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_state_in_fewer_bits_needs_no_float64(dtype):
    """As users run it. A moment after one update is (1 - b1) times the gradient, to the type's rounding."""
    with jax.enable_x64(False):
        params = {"w": jnp.linspace(-1.0, 1.0, 64 * 128).reshape(64, 128)}
        tx = held_in(optax.scale_by_adam(), dtype)
        _, state = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
        held = [x for x in jax.tree.leaves(state) if x.dtype == dtype]
        assert [x.shape for x in held] == [(64, 128)] * 2
        if dtype == "bfloat16":
            np.testing.assert_allclose(held[0].astype(jnp.float32), 0.1 * params["w"], rtol=2**-7)


# Settings

BAD = [
    ({"name": "adamv"}, "Did you mean 'adam"),
    ({"name": "lbfgs"}, "several times a step"),
    ({"name": "no_such_module:f"}, "no module 'no_such_module'"),
    ({"name": "json:dumps"}, "json:dumps"),
    ({"options": {"nesterof": True}}, "Did you mean 'nesterov'"),
    ({"options": {"b1": 0.5}}, "another setting"),
    ({"name": "sgd", "b1": 0.9}, "sgd has none"),
    ({"name": "sgd", "options": {"momentum": "much"}, "clip_norm": None}, "sgd.*cannot update this student"),
    ({"freeze": ("layer.attention*",)}, "did you mean layers.attention"),
    ({"freeze": ("*",)}, "nothing to train"),
    ({"no_decay": ("embd",)}, "did you mean embed"),
    ({"name": "schedule_free_adamw", "ema": 0.9}, "averages the parameters itself"),
    ({"name": "schedule_free_adamw", "state": "int8"}, "may be rounded"),
]


@pytest.mark.parametrize(("settings", "said"), BAD)
def test_what_cannot_be_is_said(settings, said):
    with pytest.raises(UserError, match=said):
        rule_of(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (lambda: OptimizerConfig(ema=1.0).check(), "ema is 1.0"),
        (lambda: OptimizerConfig(clip_norm=0.0).check(), "clip_norm"),
        (lambda: PrecisionConfig(loss_scale="much").check(), "'much'"),
        (lambda: PrecisionConfig(loss_scale=-1.0).check(), "above 0"),
        (lambda: PrecisionConfig(compute="float16").check(), "loss_scale"),
    ],
)
def test_what_is_out_of_range_is_said(settings, said):
    with pytest.raises(UserError, match=said):
        settings()


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd", "inverse_sqrt"])
def test_a_schedule_warms_up_and_ends_where_it_should(name):
    config = OptimizerConfig(schedule=name, learning_rate=2.0, warmup_steps=4, final_fraction=0.1, decay_fraction=0.25)
    rate = [float(build_schedule(config, 20)(i)) for i in range(21)]
    np.testing.assert_allclose(rate[:5], [0.4, 0.8, 1.2, 1.6, 2.0], rtol=1e-6)
    ends = {"cosine": 0.2, "linear": 0.2, "wsd": 0.2, "constant": 2.0, "inverse_sqrt": 2 * (4 / 20) ** 0.5}
    assert rate[20] == pytest.approx(ends[name], rel=1e-6)
    middle = {"linear": 2 - 1.8 / 2, "wsd": 2.0, "constant": 2.0, "inverse_sqrt": 2 * (4 / 12) ** 0.5, "cosine": 1.1}
    assert rate[12] == pytest.approx(middle[name], rel=1e-6)
    assert rate[18] == pytest.approx(2 - 1.8 * 3 / 5, rel=1e-6) or name != "wsd"


def test_an_optimizer_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine_of_theirs.py").write_text(
        "import optax\ndef descent(learning_rate, push=1.0):\n    return optax.sgd(lambda n: push * learning_rate(n))\n"
    )
    monkeypatch.chdir(tmp_path)
    rule = rule_of(name="mine_of_theirs:descent", options={"push": 2.0}, clip_norm=None, warmup_steps=0)
    grads = jax.tree.map(np.ones_like, PARAMS)
    after = rule.apply(rule.start(PARAMS, 0), grads, jnp.bool_(True), jnp.float64(0)).params
    close(after, jax.tree.map(lambda p: p - 2e-2, PARAMS), 1e-6)
    with pytest.raises(UserError, match="Did you mean 'push'"):
        rule_of(name="mine_of_theirs:descent", options={"pull": 2.0})
