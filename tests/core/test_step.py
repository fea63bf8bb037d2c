"""One optimizer step: how rows are cut, packed and padded cannot move it; schedules, types and teachers."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_distill.divergences import ForwardKL
from spmd_distill.head import FusedHead, ReferenceHead, Sampled
from spmd_distill.mappers import make_mapper
from spmd_distill.models import DecoderConfig, decoder
from spmd_distill.objective import Objective
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch, TrainState

V, ROWS, LENGTH = 61, 8, 6
STUDENT = DecoderConfig(
    vocab_size=V, width=16, layers=1, heads=4, kv_heads=2, head_dim=4, mlp=16, param_dtype="float64", init_std=0.4
)
TEACHER = replace(STUDENT, width=24, heads=6, tied=False)
MIX = Objective.mix(ForwardKL(), 0.7, 2.0)
DROPPED, DRAWN = replace(STUDENT, dropout=0.4), Objective.mix(ForwardKL(), 0.7, 2.0, support=Sampled(5))


@pytest.fixture
def _x64():
    with jax.enable_x64(True):
        yield


def documents() -> Batch:
    """Eight documents of six tokens, with 0 to 6 of them in the loss."""
    r = np.random.default_rng(0)
    tokens = r.integers(0, V, (ROWS, LENGTH + 1)).astype(np.int32)
    mask = r.random((ROWS, LENGTH)) < 0.6
    mask[3], mask[4], mask[5] = False, True, np.arange(LENGTH) == 2
    places = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, places, np.ones_like(places))


def padded(batch: Batch, rows: int, columns: int) -> Batch:
    """Rows and columns of padding around, holding any tokens, labels and positions."""

    def pad(x: np.ndarray, value: int) -> np.ndarray:
        return np.pad(x, ((0, rows), (0, columns)), constant_values=value)

    given = {"tokens": V - 1, "labels": 5, "mask": False, "positions": 3, "segments": 0}
    return Batch(**{name: pad(getattr(batch, name), value) for name, value in given.items()})


def packed(batch: Batch) -> Batch:
    """Two documents in each row."""
    first, second = jax.tree.map(lambda x: x[::2], batch), jax.tree.map(lambda x: x[1::2], batch)
    return jax.tree.map(lambda x, y: np.concatenate([x, y], 1), first, second.replace(segments=second.segments + 1))


def micro(batch: Batch, count: int) -> Batch:
    return jax.tree.map(lambda x: x.reshape(count, -1, x.shape[-1]), batch)


@functools.cache
def params_of(config: DecoderConfig, seed: int = 0) -> Any:
    return jax.device_get(jax.jit(decoder(config).init)(jax.random.key(seed)))


@dataclass(frozen=True)
class Poisoned(OnlineTeacher):
    """A teacher whose hidden state is NaN where the label is -1 and minus infinity where it is -2."""

    def targets(self, params, batch, shard, taps):
        out, seen = super().targets(params, batch, shard, taps)
        labels = batch.labels.reshape(-1, 1)
        hidden = jnp.where(labels == -1, jnp.nan, jnp.where(labels == -2, -jnp.inf, out.hidden))
        return out.replace(hidden=hidden), seen


@functools.cache
def program(
    layout: str = "dp2_tp4",
    mapper: str = "shard_map",
    *,
    student: DecoderConfig = STUDENT,
    teacher: OnlineTeacher | None = None,
    objective: Objective = MIX,
    head: Any = FusedHead(chunk=5),  # noqa: B008
    tx: Any = None,
    compute: str = "float64",
) -> Callable[..., Any]:
    """Compiled once: (batch [A, B, L], where to start) -> (state, metrics by name, valid tokens, gradients)."""
    teacher = teacher or OnlineTeacher(decoder(replace(TEACHER, param_dtype=student.param_dtype)))
    mapping, tx = make_mapper(mapper, layout), tx or optax.sgd(0.0)
    run = Distillation(decoder(student), teacher, objective, mapping, head, jnp.dtype(compute))
    step = run.train_step(tx, return_gradients=True)
    placed, teachers = mapping.shardings(run.state_specs(tx)), params_of(teacher.model.config, 1)

    def call(batch: Batch, state: TrainState | None = None, params: Any = params_of(student)):  # noqa: B008
        if state is None:
            fresh = TrainState(np.int32(0), params, jax.device_get(tx.init(params)), np.uint32(7))
            state = jax.device_put(fresh, placed)
        state, metrics, grads = step(state, teachers, batch)
        values = {k: float(m.value) for k, m in metrics.items()}
        return state, values, int(metrics["loss"].count), jax.tree.map(np.asarray, grads)

    return call


def close(found: Any, expected: Any, bar: float) -> None:
    def one(path: Any, x: np.ndarray, y: np.ndarray) -> None:
        error = np.abs(x - y).max() / max(np.abs(y).max(), 1e-300)
        assert error <= bar, f"{jax.tree_util.keystr(path)}: {error:.2g}"

    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree_util.tree_map_with_path(one, found, expected)


# How the same documents are cut


CUTS = {
    "four micro-batches": ("single", "shard_map", lambda d: micro(d, 4)),
    "eight data shards, one of them with nothing valid": ("dp8", "shard_map", lambda d: micro(d, 1)),
    "two by two by four": ("dp2_tp4", "shard_map", lambda d: micro(d, 2)),
    "padded rows and columns": ("dp2_tp4", "shard_map", lambda d: micro(padded(d, 8, 3), 2)),
    "two documents a row": ("fsdp4_tp2", "shard_map", lambda d: micro(packed(d), 1)),
    "two documents a row, padded": ("sp2_tp4", "vmap", lambda d: micro(padded(packed(d), 4, 4), 2)),
}


@pytest.fixture(scope="module")
def expected():
    with jax.enable_x64(True):
        return program("single", "vmap", head=ReferenceHead())(micro(documents(), 1))[1:]


@pytest.mark.usefixtures("_x64")
@pytest.mark.parametrize("cut", CUTS)
def test_the_gradient_is_that_of_all_valid_tokens_however_they_are_cut(cut, expected):
    layout, mapper, arrange = CUTS[cut]
    _, values, count, grads = program(layout, mapper)(arrange(documents()))
    assert count == expected[1] == documents().mask.sum()
    close(values, expected[0], 1e-10)
    close(grads, expected[2], 1e-10)


@pytest.fixture(scope="module")
def drawn():
    with jax.enable_x64(True):
        return program("single", "vmap", student=DROPPED, objective=DRAWN)(micro(documents(), 1))[1:]


@pytest.mark.usefixtures("_x64")
@pytest.mark.parametrize(
    ("layout", "micro_batches", "mapper"),
    [
        ("single", 2, "shard_map"),
        ("dp2_tp4", 4, "shard_map"),
        ("dp2_tp4", 2, "pmap"),
        ("sp2_tp4", 2, "vmap"),
        ("fsdp8", 1, "shard_map"),
    ],
)
def test_what_a_row_draws_does_not_depend_on_how_a_step_is_cut(layout, micro_batches, mapper, drawn):
    run = program(layout, mapper, student=DROPPED, objective=DRAWN)
    _, values, _, grads = run(micro(padded(documents(), 0, 2), micro_batches))
    close(values, drawn[0], 1e-9)
    close(grads, drawn[2], 1e-9)


@pytest.mark.usefixtures("_x64")
def test_the_gradient_is_that_of_the_loss(expected):
    """Against finite differences along one direction, so that the cuts above are held against the truth."""
    values, _, grads = expected
    assert values["loss"] == pytest.approx(0.7 * 4 * values["forward_kl"] + 0.3 * values["ce"], rel=1e-12)
    r, h = np.random.default_rng(1), 1e-6
    direction = jax.tree.map(lambda x: r.normal(size=x.shape), params_of(STUDENT))

    def loss(distance: float) -> float:
        moved = jax.tree.map(lambda p, d: p + distance * d, params_of(STUDENT), direction)
        run = program("single", "vmap", head=ReferenceHead())
        return run(micro(documents(), 1), params=moved)[1]["loss"]

    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), grads, direction)))
    assert (loss(h) - loss(-h)) / (2 * h) == pytest.approx(slope, rel=1e-6)


@pytest.mark.usefixtures("_x64")
def test_a_batch_with_nothing_valid_changes_nothing():
    batch = micro(documents(), 2)
    state, values, count, grads = program()(batch.replace(mask=np.zeros_like(batch.mask)))
    assert count == 0 and not any(values.values())
    assert not any(g.any() for g in jax.tree.leaves(grads))
    jax.tree.map(np.testing.assert_array_equal, state.params, params_of(STUDENT))
    assert state.step == 1


@pytest.mark.usefixtures("_x64")
@pytest.mark.parametrize("head", [FusedHead(chunk=5), ReferenceHead()], ids=lambda h: h.name)
def test_what_a_teacher_says_at_masked_positions_does_not_move_a_bit(head):
    run = program(teacher=Poisoned(decoder(TEACHER)), head=head)
    clean = micro(documents(), 2)
    bad = np.where(np.arange(LENGTH) % 2, -1, -2)
    results = [run(clean), run(clean.replace(labels=np.where(clean.mask, clean.labels, bad).astype(np.int32)))]
    jax.tree.map(np.testing.assert_array_equal, *(r[1:] for r in results))
    assert results[0][1]["loss"] > 0
    jax.tree.map(np.testing.assert_array_equal, *(r[0].params for r in results))


@pytest.mark.usefixtures("_x64")
def test_evaluation_gives_the_training_loss_with_dropout_off(expected):
    """The student trains with dropout 0.5; the expected numbers come from a training step without any."""
    mapper = make_mapper("shard_map", "dp2_tp4")
    student = decoder(replace(STUDENT, dropout=0.5))
    run = Distillation(student, OnlineTeacher(decoder(TEACHER)), MIX, mapper, FusedHead(chunk=5), jnp.float64)
    metrics = run.eval_step()(params_of(STUDENT), params_of(TEACHER, 1), documents(), np.int32(0))
    values = {k: float(m.value) for k, m in metrics.items()}
    close(values, {k: v for k, v in expected[0].items() if k not in ("grad_norm", "skipped")}, 1e-10)
    assert metrics["loss"].count == expected[1]


@pytest.mark.usefixtures("_x64")
def test_a_model_that_teaches_itself_drops_out_as_a_student_only():
    shared = replace(STUDENT, dropout=0.5)
    run, state, seen = program(student=shared, teacher=OnlineTeacher(decoder(shared))), None, []
    for _ in range(2):
        state, values, *_ = run(micro(documents(), 2), state)
        seen.append(values)
    assert seen[0]["ce_teacher"] == seen[1]["ce_teacher"]
    assert seen[0]["ce_student"] != seen[1]["ce_student"]
    assert all(values["kl"] > 0.01 for values in seen)


# Schedules, types, the optimizer


@pytest.mark.usefixtures("_x64")
def test_schedules_move_every_step_without_a_new_program():
    traces = []

    def alpha(step):
        traces.append(step)
        return 0.9 - 0.2 * step

    run = program(objective=Objective.mix(ForwardKL(), alpha, optax.linear_schedule(1.0, 3.0, 2)))
    state, found, traced = None, [], []
    for number in range(3):
        state, values, _, grads = run(micro(documents(), 2), state)
        found.append((values, grads))
        traced.append(len(traces))
        a, t = 0.9 - 0.2 * number, 1.0 + number
        assert values["loss"] == pytest.approx(a * t**2 * values["forward_kl"] + (1 - a) * values["ce"], rel=1e-12)
    assert traced[0] == traced[2] > 0
    assert found[0][0]["forward_kl"] == pytest.approx(found[0][0]["kl"], rel=1e-12)  # at temperature 1
    _, *constant = program()(micro(documents(), 2))  # weights and temperature of the middle step
    close(found[1][0], constant[0], 1e-10)
    close(found[1][1], constant[2], 1e-10)
    assert found[2][0]["forward_kl"] < found[1][0]["forward_kl"] < found[0][0]["forward_kl"]


def test_bfloat16_computes_and_float32_keeps():
    single = replace(STUDENT, param_dtype="float32")
    batch, found = micro(documents(), 2), {}
    for compute in ("float32", "bfloat16"):
        tx = optax.sgd(1e-2, momentum=0.9)
        state, values, count, grads = program(student=single, compute=compute, tx=tx)(batch)
        assert {x.dtype for x in jax.tree.leaves((grads, state.params))} == {np.dtype("float32")}
        assert {x.dtype for x in jax.tree.leaves(state.opt_state)} == {np.dtype("float32")}
        assert count == batch.mask.sum()
        moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), state.params, params_of(single))
        assert all(m > 0 for m in jax.tree.leaves(moved))
        found[compute] = values, grads
    assert found["bfloat16"][0]["loss"] == pytest.approx(found["float32"][0]["loss"], rel=0.02)
    assert found["bfloat16"][0]["loss"] != found["float32"][0]["loss"]
    close(found["bfloat16"][1], found["float32"][1], 0.1)
