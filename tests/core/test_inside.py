"""Looking inside: what taps keep and cost, and losses inside the network as terms of a step, on any layout."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from spmd_distill.collectives import copy_to
from spmd_distill.divergences import ForwardKL
from spmd_distill.errors import UserError
from spmd_distill.features import FEATURES_KEY, AbstractFeatureLoss, Explicit, Last, Side, Tokens, Uniform
from spmd_distill.head import FusedHead, ReferenceHead
from spmd_distill.mappers import MAPPERS, make_mapper
from spmd_distill.models import DecoderConfig, Shard, decoder
from spmd_distill.models.base import declare
from spmd_distill.models.taps import TAPS, Tap
from spmd_distill.objective import FeatureTerm, Objective, WeightedTerm
from spmd_distill.optimizer import UpdateRule
from spmd_distill.sharding import REPLICATED
from spmd_distill.state import create_state, init_params
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch

V, ROWS, LENGTH = 61, 8, 8
STUDENT = DecoderConfig(
    vocab_size=V, width=16, layers=4, heads=4, kv_heads=2, head_dim=4, mlp=16, param_dtype="float64", init_std=0.4
)
TEACHER = replace(STUDENT, width=24, layers=6, heads=6, tied=False)
ONE = make_mapper("vmap", "single")


@pytest.fixture
def _x64():
    with jax.enable_x64(True):
        yield


@dataclass(frozen=True)
class Nearness(AbstractFeatureLoss):
    """A loss of a user's own, with a parameter: squared distance of the projected student to the teacher."""

    at: str = "block_output"
    shared: bool = False

    @property
    def taps(self) -> tuple[str, ...]:
        return (self.at,)

    def declare(self, rngs: nnx.Rngs, student: Any, teacher: Any, pairs: int) -> dict[str, nnx.Param]:
        shape, stack = (student.width, teacher.width), None if self.shared else pairs
        init = nnx.initializers.normal(0.3)
        return {"w": declare(rngs, init, shape, ("embed", "act_embed"), student.param_dtype, stack)}

    def __call__(self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]) -> jax.Array:
        x, y = (tokens.spread(side.taps[self.at]) for side in (student, teacher))
        w: Any = copy_to(params["w"], "model")
        return tokens.total(jnp.square(x @ w - y).mean(-1), tokens.own(tokens.valid), shared=True)


@dataclass(frozen=True)
class Loud(AbstractFeatureLoss):
    """The squared size of the student's heads, which lie over `model`."""

    @property
    def taps(self) -> tuple[str, ...]:
        return ("queries", "mlp_output")

    def __call__(self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]) -> jax.Array:
        heads = jnp.square(student.taps["queries"]).sum((-1, -2))
        out = jnp.square(student.taps["mlp_output"]).mean(-1)
        of_out = tokens.total(out, tokens.here(tokens.valid), shared=tokens.sequence_sharded)
        return tokens.total(heads, tokens.valid, shared=True) + of_out


MOVING = optax.linear_schedule(0.1, 0.2, 9)
KL = WeightedTerm(ForwardKL(), 0.5, 2.0)
TERMS = (
    KL,
    FeatureTerm(Nearness(), Uniform(), 0.3),
    FeatureTerm(
        Nearness("attention_output", shared=True), ((3, 1), (0, 0), (3, 5)), optax.linear_schedule(0.1, 0.2, 9)
    ),
    FeatureTerm(Nearness("final_norm"), weight=0.2),
    FeatureTerm(Loud(), Last(2), 0.05),
)
OBJECTIVE = Objective(TERMS)


def batch(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Batch:
    r = np.random.default_rng(seed)
    tokens = r.integers(0, V, (rows, length + 1)).astype(np.int32)
    segments = np.where(np.arange(length) < length // 2, 1, 2) * np.ones((rows, 1), int)
    segments[1::3, -2:] = 0
    mask = (r.random((rows, length)) < 0.7) & (segments > 0)
    mask[0] = False
    places = np.tile(np.arange(length) % (length // 2), (rows, 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, places.astype(np.int32), segments.astype(np.int32))


def micro(batch: Batch, count: int) -> Batch:
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)


def distillation(layout="single", mapper="vmap", objective=OBJECTIVE, head=None, **changes: Any) -> Distillation:
    student, teacher = decoder(replace(STUDENT, **changes)), decoder(TEACHER)
    mapping = make_mapper(mapper, layout)
    return Distillation(student, OnlineTeacher(teacher), objective, mapping, head or FusedHead(chunk=5), jnp.float64)


def stepped(run: Distillation, given: Batch, tx: Any = None) -> Any:
    """(state, metrics, gradients) after one step, on the host."""
    tx = tx or optax.sgd(0.1)
    state = create_state(run, tx, init_params(run.student, run.mapper, 0), seed=3)
    teacher = init_params(run.teacher.model, run.mapper, 1)
    state, metrics, grads = run.train_step(tx, return_gradients=True)(state, teacher, given)
    return jax.device_get((state.params, {k: m.value for k, m in metrics.items()}, grads))


def close(found: Any, expected: Any, bar: float = 1e-9) -> None:
    def one(path: Any, x: np.ndarray, y: np.ndarray) -> None:
        x, y = np.float64(x), np.float64(y)
        error = np.abs(x - y).max() / max(np.abs(y).max(), 1e-300)
        assert error <= bar, f"{jax.tree_util.keystr(path)}: {error:.2g}"

    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree_util.tree_map_with_path(one, found, expected)


# Taps


def kept(taps: dict[str, Tap], config: DecoderConfig = TEACHER, given: Batch | None = None) -> dict[str, np.ndarray]:
    model, shard = decoder(config), Shard(ONE.layout, jnp.dtype("float64"))
    body = lambda p, b: model.apply_tapped(p, b, shard, taps)[1]  # noqa: E731
    run = jax.jit(ONE.map(body, (REPLICATED, REPLICATED), REPLICATED))
    return jax.device_get(run(init_params(model, ONE, 0), given or batch()))


@pytest.mark.usefixtures("_x64")
def test_the_layers_that_are_wanted_are_kept():
    every = kept(dict.fromkeys(TAPS, Tap()))
    assert {name: len(x) for name, x in every.items()} == {name: 1 if name == "final_norm" else 6 for name in TAPS}
    for layers in ((0,), (5,), (2,), (1, 4), (0, 3, 5), tuple(range(6))):
        found = kept(dict.fromkeys(TAPS, Tap(layers=layers)))
        for name, x in found.items():
            np.testing.assert_array_equal(x, every[name] if name == "final_norm" else every[name][list(layers)])
    half = kept({"queries": Tap(lambda x: x.astype(jnp.bfloat16), (3,)), "block_output": Tap(layers=(1,))})
    assert half["queries"].dtype == jnp.bfloat16 and half["block_output"].shape == (1, ROWS, LENGTH, 24)


@pytest.mark.usefixtures("_x64")
def test_what_passes_adds_up():
    """The residual stream is what came in and what the two branches add."""
    found = kept(dict.fromkeys(TAPS, Tap()))
    stream = found["block_input"] + found["attention_output"] + found["mlp_output"]
    np.testing.assert_allclose(stream, found["block_output"], rtol=1e-12)
    np.testing.assert_array_equal(found["block_input"][1:], found["block_output"][:-1])
    last = found["block_output"][-1]
    normal = last / np.sqrt((last**2).mean(-1, keepdims=True) + TEACHER.norm_eps)
    np.testing.assert_allclose(found["final_norm"][0], normal, rtol=1e-6)


def memory(layers: tuple[int, ...] | None, remat: str) -> tuple[int, int]:
    """Bytes of temporary memory of a gradient through the last hidden state and a tap; of one array that is kept."""
    config = replace(TEACHER, layers=12, remat=remat, width=32, param_dtype="float32")
    model, shard = decoder(config), Shard(ONE.layout, jnp.dtype("float32"))
    taps = {} if layers is None else {"block_output": Tap(layers=layers)}

    def loss(params: Any, given: Batch) -> jax.Array:
        out, seen = model.apply_tapped(params, given, shard, taps)
        return jnp.sum(jnp.square(out.hidden)) + sum(jnp.sum(x**2) for x in seen.values())

    given = batch(16, 64)
    params = model.abstract
    compiled = jax.jit(ONE.map(jax.grad(loss), (REPLICATED, REPLICATED), REPLICATED)).lower(params, given).compile()
    return compiled.memory_analysis().temp_size_in_bytes, 16 * 64 * 32 * 4


@pytest.mark.parametrize("remat", ["none", "full"])
def test_only_the_layers_that_are_wanted_cost_memory(remat):
    none, one = memory(None, remat)
    few, many = memory((5, 11), remat)[0] - none, memory(tuple(range(12)), remat)[0] - none
    assert few <= 2 * 2.5 * one  # forward, its gradient, and what XLA moves
    assert 8 * one <= many <= 12 * 2.5 * one


# Terms of a step


CASES = [
    *itertools.product(MAPPERS, ["dp2_tp4", "fsdp2_sp4"]),
    ("shard_map", "dp8"),
    ("shard_map", "fsdp8"),
    ("shard_map", "sp2_tp4"),
    ("shard_map", "replica2_fsdp2_tp2"),
]


@functools.cache
def expected() -> Any:
    return stepped(distillation(head=ReferenceHead()), micro(batch(), 1))


@pytest.mark.usefixtures("_x64")
@pytest.mark.parametrize(("mapper", "layout"), CASES)
def test_a_step_is_that_of_one_device(mapper, layout):
    found = stepped(distillation(layout, mapper), micro(batch(), 1))
    close(found, expected())


@pytest.mark.usefixtures("_x64")
def test_micro_batches_padding_and_remat_change_nothing():
    close(stepped(distillation(), micro(batch(), 4)), expected())
    close(stepped(distillation("dp2_tp4", "shard_map", remat="full"), micro(batch(), 2)), expected())

    def pad(x: np.ndarray, value: int) -> np.ndarray:
        return np.pad(x, ((0, 4), (0, 4)), constant_values=value)

    given, values = batch(), {"tokens": 7, "labels": 5, "mask": False, "positions": 3, "segments": 0}
    longer = Batch(**{name: pad(getattr(given, name), value) for name, value in values.items()})
    close(stepped(distillation(), micro(longer, 1)), expected())


@pytest.mark.usefixtures("_x64")
def test_the_loss_is_the_weighted_sum_of_its_terms():
    _, values, grads = expected()
    names = ("forward_kl", "nearness", "nearness_2", "nearness_3", "loud")
    weights = (0.5 * 4, 0.3, 0.1, 0.2, 0.05)
    assert values["loss"] == pytest.approx(sum(w * values[n] for w, n in zip(weights, names, strict=True)), rel=1e-7)
    assert {name: x["w"].shape for name, x in grads[FEATURES_KEY].items()} == {
        "nearness": (4, 16, 24), "nearness_2": (16, 24), "nearness_3": (1, 16, 24),
    }  # fmt: skip
    assert all(np.abs(x).max() > 1e-4 for x in jax.tree.leaves(grads))


@pytest.mark.usefixtures("_x64")
def test_an_objective_may_look_inside_alone():
    alone = Objective((FeatureTerm(Nearness(), Last(1)),))
    _, values, _ = stepped(distillation(objective=alone), micro(batch(), 1))
    assert values["loss"] == pytest.approx(values["nearness"], rel=1e-12) and values["kl"] > 0
    close(stepped(distillation("dp2_tp4", "shard_map", objective=alone), micro(batch(), 1))[1], values)


@pytest.mark.usefixtures("_x64")
def test_a_loss_trains_its_parameters_under_a_frozen_student():
    run = distillation("dp2_tp4", "shard_map")
    trained = jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == FEATURES_KEY, run.trained.abstract)
    rule = UpdateRule(optax.sgd(0.1), trained)
    before = jax.device_get(run.trained.complete(init_params(run.student, run.mapper, 0), run.mapper, 3))
    after, _, grads = stepped(run, micro(batch(), 1), rule)
    assert set(grads) - {FEATURES_KEY} == set() or not jax.tree.leaves(
        {k: v for k, v in grads.items() if k != FEATURES_KEY}
    )
    for name, x in after.items():
        same = jax.tree.map(np.array_equal, x, before[name])
        assert all(jax.tree.leaves(same)) == (name != FEATURES_KEY)


@pytest.mark.usefixtures("_x64")
def test_dropout_reaches_the_student_alone():
    one, two = (stepped(distillation(layout, mapper, dropout=0.3), micro(batch(), 1))
                for layout, mapper in (("single", "vmap"), ("fsdp2_sp4", "shard_map")))  # fmt: skip
    close(two, one)
    assert one[1]["nearness"] != expected()[1]["nearness"]


@pytest.mark.usefixtures("_x64")
@pytest.mark.parametrize(
    ("term", "said"),
    [
        (FeatureTerm(Nearness("block"), Last(1)), "nearness: no tap point is called 'block'; known are block_input"),
        (FeatureTerm(Nearness(), Last(9)), "Layer map Last: count is 9; expected 1 to 4"),
        (FeatureTerm(Nearness(), ((0, 6),)), r"Layer pair \[0, 6\]: expected a layer of the student, 0 to 3, and one"),
        (FeatureTerm(Nearness(), Explicit(())), "Layer pairs: none given"),
    ],
)
def test_what_cannot_be_compared_is_said(term, said):
    with pytest.raises(UserError, match=said):
        _ = distillation(objective=Objective((KL, term))).inside
