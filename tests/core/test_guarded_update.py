"""A step that must not happen leaves no trace, under every mapper; one that may happens as if nobody had asked."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_step import STUDENT, TEACHER, Poisoned, documents, micro, params_of

from spmd_distill.divergences import ForwardKL
from spmd_distill.head import FusedHead, ReferenceHead
from spmd_distill.mappers import make_mapper
from spmd_distill.models import decoder
from spmd_distill.objective import Objective
from spmd_distill.optimizer import Skip, all_finite, keep_unless
from spmd_distill.step import Distillation
from spmd_distill.types import TrainState

SMALL = replace(STUDENT, param_dtype="float32")


@dataclass(frozen=True)
class Steep(ForwardKL):
    """Forward KL with a gradient that is NaN, though its value is finite."""

    def integrand(self, t, s):
        return super().integrand(t, s) + jnp.sqrt(s - jax.lax.stop_gradient(s))


@functools.cache
def program(layout: str, mapper: str, divergence: Any, skip: Any, head: Any = FusedHead(chunk=5)) -> Any:  # noqa: B008
    mapping = make_mapper(mapper, layout)
    teacher = Poisoned(decoder(replace(TEACHER, param_dtype="float32")))
    run = Distillation(decoder(SMALL), teacher, Objective.mix(divergence, 0.7, 2.0), mapping, head)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 0.0, 10)))
    step = run.train_step(tx, skip=skip)
    shardings = mapping.shardings(run.state_specs(tx))

    def start() -> TrainState:
        """A state with moments and counts that are not zero."""
        params, r = params_of(SMALL), np.random.default_rng(3)
        fresh = jax.tree.map(lambda x: np.abs(r.normal(size=np.shape(x))) + 1, jax.device_get(tx.init(params)))
        moments = jax.tree.map(lambda x, like: x.astype(like.dtype), fresh, jax.device_get(tx.init(params)))
        return jax.device_put(TrainState(np.int32(4), params, moments, np.uint32(7)), shardings)

    def call(batch: Any, *limit: Any) -> tuple[TrainState, TrainState, dict[str, float]]:
        before = jax.device_get(start())
        after, metrics = step(start(), params_of(teacher.model.config, 1), batch, *limit)
        return before, jax.device_get(after), {name: float(m.value) for name, m in metrics.items()}

    return call


def bad_row(batch: Any) -> Any:
    """The teacher is NaN on one valid token of one row."""
    labels = batch.labels.copy()
    place = tuple(np.argwhere(batch.mask)[7])
    labels[place] = -1
    return batch.replace(labels=labels)


def untouched(before: TrainState, after: TrainState) -> bool:
    """But for the step's number."""
    assert after.step == before.step + 1
    pairs = zip(jax.tree.leaves(before.replace(step=0)), jax.tree.leaves(after.replace(step=0)), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


@pytest.mark.parametrize(("layout", "mapper", "micro_batches"), [("dp2_tp4", "shard_map", 2), ("fsdp4_tp2", "pmap", 1)])
def test_a_bad_teacher_moves_no_bit(layout, mapper, micro_batches):
    call, good = program(layout, mapper, ForwardKL(), Skip()), micro(documents(), micro_batches)
    before, after, values = call(bad_row(good))
    assert untouched(before, after) and values["skipped"] == 1
    assert np.isnan(values["ce_teacher"]) and np.isfinite(values["ce_student"])
    before, after, values = call(good)
    assert not untouched(before, after) and values["skipped"] == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))


@pytest.mark.parametrize(("layout", "mapper"), [("dp2_tp4", "vmap"), ("fsdp4_tp2", "shard_map")])
def test_a_gradient_that_is_not_finite_moves_no_bit(layout, mapper):
    before, after, values = program(layout, mapper, Steep(), Skip())(micro(documents(), 2))
    assert untouched(before, after) and values["skipped"] == 1
    assert np.isnan(values["grad_norm"]) and np.isfinite(values["loss"]) and np.isfinite(values["ce_teacher"])


def test_the_reference_head_tells_of_a_bad_teacher_too():
    call = program("dp2_tp4", "shard_map", ForwardKL(), Skip(), ReferenceHead())
    before, after, values = call(bad_row(micro(documents(), 2)))
    assert untouched(before, after) and np.isnan(values["ce_teacher"]) and np.isfinite(values["ce_student"])


def test_without_the_guard_everything_is_lost():
    before, after, values = program("dp2_tp4", "vmap", Steep(), Skip(False, False))(micro(documents(), 2))
    assert not untouched(before, after) and values["skipped"] == 0
    assert not any(np.isfinite(x).any() for x in jax.tree.leaves(after.params["layers"]))


def test_a_guarded_step_is_the_step_without_a_guard():
    batch = micro(documents(), 2)
    _, guarded, _ = program("dp2_tp4", "shard_map", ForwardKL(), Skip())(batch)
    _, plain, _ = program("dp2_tp4", "shard_map", ForwardKL(), Skip(False, False))(batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9), guarded, plain)


def test_a_loss_above_the_limit_moves_no_bit_and_one_below_does():
    call, batch = program("dp2_tp4", "shard_map", ForwardKL(), Skip(spike=True)), micro(documents(), 2)
    *_, values = call(batch, np.float32(np.inf))
    assert values["skipped"] == 0
    for share, skipped in ((0.99, 1), (1.01, 0)):
        before, after, found = call(batch, np.float32(share * values["loss"]))
        assert untouched(before, after) == bool(skipped) == found["skipped"]


def test_one_number_in_a_tree_is_enough():
    trees = {"a": jnp.ones((3, 4)), "b": jnp.arange(5)}
    assert all_finite(*trees.values()) and all_finite()
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        spoiled = trees["a"].at[2, 1].set(bad)
        assert not all_finite(spoiled, trees["b"])
        kept = keep_unless(all_finite(spoiled), trees | {"a": spoiled}, trees)
        jax.tree.map(np.testing.assert_array_equal, kept, trees)
