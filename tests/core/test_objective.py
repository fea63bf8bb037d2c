"""What is minimised: names, weights, the losses on labels, and numbers that move without a new program."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import TERMS, Triangular
from problems import DIFFERENT, PLAIN, Problem, V, close, problem

from spmd_distill.collectives import psum, to_varying
from spmd_distill.divergences import Alpha, CrossEntropy, ForwardKL, GeneralizedJSD, SkewKL, ZLoss
from spmd_distill.head import FusedHead, ReferenceHead, Sampled, TopK
from spmd_distill.mappers import make_mapper
from spmd_distill.models import keys_of_rows
from spmd_distill.objective import Objective, WeightedTerm
from spmd_distill.types import Batch, LogitTransform, Unembedded

FUSED = FusedHead(chunk=5)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def minimised(
    objective: Objective, head: Any = FUSED, mapper: str = "vmap", layout: str = "single", transforms=DIFFERENT
):
    """(problem, step[, key]) -> (loss per valid token, its gradient by the hidden states, sums by name)."""
    mapping = make_mapper(mapper, layout)
    place = mapping.layout
    model = (place.spec(("batch", None)), place.spec(("vocab", None)), place.spec(("vocab",)))
    row, whole = place.spec(("batch",)), place.spec(())

    def body(hs, ws, bs, ht, wt, bt, labels, mask, step, key):
        column = labels[:, None]  # of rows of one token
        batch, count = Batch(column, column, mask[:, None], column, column), psum(jnp.sum(mask), place.batch_axes)

        ws, bs = to_varying((ws, bs), tuple(a for a in place.batch_axes if a not in place.vocab_axes))

        def loss(hs):
            student, teacher = Unembedded(hs, ws, transforms[0], bs), Unembedded(ht, wt, transforms[1], bt)
            axes = {"batch_axes": place.batch_axes, "vocab_axes": place.vocab_axes}
            keys = None
            if key is not None:
                keys = keys_of_rows(jax.random.wrap_key_data(key), len(labels), place.batch_axes)
            return objective(head, student, teacher, batch, step, count, agreement=False, keys=keys, **axes)

        (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(hs)
        return psum((value, sums), place.batch_axes), gradient

    run = jax.jit(mapping.map(body, (*model, *model, row, row, whole, whole), (whole, model[0])))

    def call(p: Problem, step: int = 0, key: Any = None):
        (loss, sums), gradient = run(*p.arrays[:-1], jnp.int32(step), key)
        return float(loss), np.asarray(gradient), jax.tree.map(float, sums)

    return call


# Names and weights


def test_a_mix_leaves_out_what_has_no_weight():
    kinds = lambda objective: [type(t.divergence) for t in objective.terms]  # noqa: E731
    assert kinds(Objective.mix(ForwardKL())) == [ForwardKL, CrossEntropy]
    assert kinds(Objective.mix(ForwardKL(), 1.0)) == [ForwardKL]
    assert kinds(Objective.mix(ForwardKL(), 0.0, z_loss=1e-4)) == [CrossEntropy, ZLoss]
    assert kinds(Objective.mix(ForwardKL(), lambda step: 1.0)) == [ForwardKL, CrossEntropy]
    mixed = Objective.mix(Alpha(), 0.9, 3.0, label_smoothing=0.1, support=TopK(8), vocab_size=20)
    weights, temperatures = mixed.coefficients(jnp.int32(0), jnp.float64)
    np.testing.assert_allclose(weights, [0.9 * 9, 0.1])
    np.testing.assert_allclose(temperatures, [3, 1])
    assert (mixed.support, mixed.vocab_size, mixed.terms[1].divergence.label_smoothing) == (TopK(8), 20, 0.1)


def test_terms_of_one_kind_are_numbered_and_reported_apart():
    parts = (ForwardKL(), Alpha(0.3), ForwardKL(), Alpha(0.8), ForwardKL(), CrossEntropy(), CrossEntropy(0.5))
    objective = Objective(tuple(WeightedTerm(d, 1.0, 1.0 + i) for i, d in enumerate(parts)))
    assert objective.labels == ("forward_kl", "alpha", "forward_kl_2", "alpha_2", "forward_kl_3", "ce", "ce_2")
    _, _, sums = minimised(objective)(problem())
    assert set(sums) == {"loss", *objective.labels}
    assert sums["forward_kl"] > sums["forward_kl_2"] > sums["forward_kl_3"]  # hotter and hotter
    assert sums["alpha"] != sums["alpha_2"] and sums["ce"] != sums["ce_2"]
    squares = [(1.0 + i) ** 2 if d.name != "ce" else 1 for i, d in enumerate(parts)]
    assert sums["loss"] == pytest.approx(sum(w * sums[n] for w, n in zip(squares, objective.labels, strict=True)))


@pytest.mark.parametrize("head", [FUSED, ReferenceHead()], ids=lambda h: h.name)
def test_losses_on_labels_are_those_of_optax(head):
    """Label smoothing spreads over all real tokens, the label among them; gradients by JAX's own derivative."""
    p = problem()
    labels, mask = jnp.asarray(p.labels), jnp.asarray(p.mask)

    def of(hidden: jax.Array, loss: Any) -> jax.Array:
        z = hidden @ p.ws[:V].T + p.bs[:V]
        z = jnp.tanh(z * p.transforms[0].logit_scale / p.transforms[0].softcap) * p.transforms[0].softcap
        return jnp.where(mask, loss(z), 0).sum() / mask.sum()

    smooth = lambda z: optax.softmax_cross_entropy(z, optax.smooth_labels(jax.nn.one_hot(labels, V), 0.2))  # noqa: E731
    losses = {
        CrossEntropy(): lambda z: optax.softmax_cross_entropy_with_integer_labels(z, labels),
        CrossEntropy(0.2): smooth,
        CrossEntropy(lambda step: 0.05 * step): smooth,
        ZLoss(): lambda z: jax.nn.logsumexp(z, axis=-1) ** 2,
    }
    objective = Objective(tuple(WeightedTerm(d, 1.0 + i) for i, d in enumerate(losses)))
    found = minimised(objective, head)(p, 4)
    total = 0
    for i, (name, loss) in enumerate(zip(objective.labels, losses.values(), strict=True)):
        value, gradient = jax.value_and_grad(of)(jnp.asarray(p.hs), loss)
        close(found[2][name] / mask.sum(), value, 1e-12, name)
        total += (1.0 + i) * gradient
    close(found[1], total, 1e-11, "d hidden")


# What moves


def test_every_number_of_an_objective_may_move_without_a_new_program():
    traces = []

    def moving(start: float, by: float, step: Any) -> Any:
        traces.append(step)
        return start + by * step

    def objective(number: Any) -> Objective:
        """Every number from `number(start, by)`."""
        mix = Objective.mix(
            GeneralizedJSD(number(0.2, 0.3), "interpolation"),
            number(0.9, -0.4),
            number(1.0, 0.5),
            label_smoothing=number(0.0, 0.1),
            z_loss=number(1e-2, 1e-2),
        )
        more = Triangular(number(0.5, 1.0)), SkewKL(number(0.1, 0.2)), Alpha(number(0.0, 0.5))
        return Objective((*mix.terms, *(WeightedTerm(d, 0.1, 2.0) for d in more)))

    p, fixed = problem(), ReferenceHead()
    constant = [minimised(objective(lambda start, by, step=step: start + by * step), fixed)(p) for step in range(3)]
    for head in (FUSED, ReferenceHead()):
        run, traced = minimised(objective(lambda start, by: functools.partial(moving, start, by)), head), []
        for step, (loss, gradient, sums) in enumerate(constant):
            found = run(p, step)
            traced.append(len(traces))
            # At an end, a schedule's value is close to the limit that a plain number takes.
            bar = 1e-5 if step in (0, 2) else 1e-11
            close(found[0], loss, bar, f"loss at {step}")
            close(found[1], gradient, bar, f"d hidden at {step}")
            for name, value in sums.items():
                close(found[2][name], value, bar, f"{name} at {step}")
        assert traced[0] == traced[2] > 0


def test_a_divergence_of_ones_own_needs_nothing_but_its_formula():
    """On a support, mixed with labels, with a schedule; that it is right everywhere is for test_head.py."""
    p = problem(transforms=PLAIN)
    objective = Objective.mix(Triangular(lambda step: 0.5 + step), 0.5, 2.0, support=TopK(6))
    found = [minimised(objective, head, transforms=PLAIN)(p, 1) for head in (FUSED, ReferenceHead())]
    close(found[0][0], found[1][0], 1e-12, "loss")
    close(found[0][1], found[1][1], 1e-11, "d hidden")
    assert set(found[0][2]) == {"loss", "triangular", "ce"}
    assert TERMS["own"].name == "triangular"


# Random numbers


def test_a_sample_does_not_depend_on_the_layout_and_does_on_step_and_key():
    p = problem(transforms=PLAIN)
    objective = Objective.mix(Alpha(), 0.5, 2.0, support=Sampled(5))
    one = minimised(objective, ReferenceHead(), transforms=PLAIN)
    wanted = one(p, 3)
    for mapper, layout in (("shard_map", "fsdp2_tp4"), ("pmap", "dp2_tp4")):
        found = minimised(objective, FUSED, mapper, layout, transforms=PLAIN)(p, 3)
        close(found[0], wanted[0], 1e-12, "loss")
        close(found[1], wanted[1], 1e-11, "d hidden")
    again, later = one(p, 3), one(p, 4)
    assert again[0] == wanted[0] != later[0]
    keys = [jax.random.key_data(jax.random.key(seed)) for seed in (0, 1)]
    assert one(p, 3, keys[0])[0] == one(p, 9, keys[0])[0] != one(p, 3, keys[1])[0]


@pytest.mark.parametrize("types", [(jnp.float32, jnp.float64), (jnp.float64, jnp.float32), (jnp.bfloat16, jnp.float64)])
@pytest.mark.parametrize("head", [FusedHead(chunk=3), ReferenceHead()], ids=lambda head: head.name)
def test_a_teacher_and_a_student_of_different_widths_of_numbers(head, types):
    """As a module of another code base may be, where JAX is allowed float64: computed in the student's."""
    with jax.enable_x64(True):
        r = np.random.default_rng(0)
        make = lambda dtype: Unembedded(  # noqa: E731
            jnp.asarray(r.normal(size=(6, 4)), dtype), jnp.asarray(r.normal(size=(128, 4)), dtype), LogitTransform(128)
        )
        student, teacher = make(types[0]), make(types[1])
        ids = jnp.zeros((1, 6), jnp.int32)
        batch = Batch(ids, ids, ids == 0, ids, ids)
        mapper = make_mapper("vmap", "single")

        def body(student, teacher):
            def loss(hidden):
                moved = replace(student, hidden=hidden)
                how = {"agreement": True, "batch_axes": ("data",)}
                return Objective.mix(ForwardKL())(head, moved, teacher, batch, jnp.int32(0), jnp.int32(6), **how)[0]

            return jax.value_and_grad(loss)(student.hidden)

        spec = mapper.layout.spec(())
        loss, gradient = jax.jit(mapper.map(body, (spec, spec), spec))(student, teacher)
        assert loss.dtype == jnp.promote_types(types[0], jnp.float32) and gradient.dtype == types[0]
        assert np.isfinite(loss)
