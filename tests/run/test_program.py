"""A program compiled ahead: what it needs, and that it stays the one that was compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_run

from spmd_distill.build import load_text, set_up
from spmd_distill.data import Loader
from spmd_distill.divergences import ForwardKL
from spmd_distill.head import FusedHead
from spmd_distill.mappers import make_mapper
from spmd_distill.models import DecoderConfig, decoder
from spmd_distill.objective import Objective, WeightedTerm
from spmd_distill.program import (
    abstract_like,
    analytic_flops,
    compile_program,
    count_flops,
    published_peak,
    step_flops,
)
from spmd_distill.state import compile_train_step
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch


def test_memory_is_that_of_the_arrays():
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=where)
    step = jax.jit(lambda w, x: (w + x.T @ x, x.sum()), donate_argnums=0)
    made = compile_program(step, w, abstract_like(np.ones((8, 64), np.float32), where))
    assert made.memory is not None
    assert made.memory.arguments == 4 * (64 * 64 + 8 * 64) and made.memory.aliased == 4 * 64 * 64
    assert made.memory.total >= made.memory.arguments + 4
    assert made.cost["flops"] >= 2 * 8 * 64 * 64 and made.seconds > 0
    out, total = made(jnp.zeros((64, 64)), jnp.ones((8, 64)))
    assert out[0, 0] == 8 and total == 512
    with pytest.raises(TypeError):
        made(jnp.zeros((64, 64)), jnp.ones((9, 64)))


def test_a_step_is_known_before_anything_is_placed(tmp_path):
    setup = set_up(tiny_run(tmp_path))
    train = load_text(setup).train
    step = compile_train_step(setup.run, setup.tx, Loader(train, 4, 2, 0).batch(0))
    layout = setup.run.mapper.layout
    shardings = setup.run.mapper.shardings(setup.run.student.specs(layout))
    held = jax.tree.map(
        lambda x, s: np.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, setup.run.student.abstract, shardings
    )
    parameters = sum(jax.tree.leaves(held))
    assert step.memory is not None
    assert step.memory.aliased >= 3 * parameters, "parameters and both moments are updated in place"


def matmuls(w, x):
    """Loop-free: what XLA counts is what it does."""
    h = jax.nn.relu(x @ w["a"])
    return jnp.einsum("bd,df,ef->be", h, w["b"], w["c"]).sum()


W = {"a": jnp.ones((24, 40)), "b": jnp.ones((40, 56)), "c": jnp.ones((8, 56))}


@pytest.mark.parametrize("function", [matmuls, jax.value_and_grad(matmuls)])
def test_counted_is_what_xla_counts_where_nothing_loops(function):
    x = jnp.ones((64, 24))
    theirs = compile_program(jax.jit(function), W, x).cost["flops"]
    ours = count_flops(function, W, x)
    assert ours <= theirs < 1.1 * ours  # they count additions and relu too


def test_loops_branches_and_shards_count_as_often_as_they_run():
    w, x = jnp.ones((5, 16, 16)), jnp.ones((8, 16))
    once = 2 * 8 * 16 * 16

    def scanned(w, x):
        return jax.lax.scan(lambda h, wi: (jnp.tanh(h @ wi), None), x, w)[0]

    assert count_flops(scanned, w, x) == 5 * once
    assert count_flops(jax.jit(jax.grad(lambda w, x: scanned(w, x).sum(), (0, 1))), w, x) == 3 * 5 * once
    assert count_flops(lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ w[0] @ w[1], lambda: x), w, x) == 2 * once
    layout = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    P = jax.sharding.PartitionSpec
    cut = jax.shard_map(lambda w, x: x @ w[0], mesh=layout, in_specs=(P(), P("data")), out_specs=P("data"))
    assert count_flops(cut, w, x) == once
    kernel, image = jnp.ones((4, 3, 5, 5)), jnp.ones((2, 3, 9, 9))
    convolved = compile_program(jax.jit(conv), image, kernel).cost["flops"]
    assert count_flops(conv, image, kernel) == 2 * (2 * 4 * 5 * 5) * 3 * 25
    assert convolved == pytest.approx(count_flops(conv, image, kernel), rel=0.05)


def conv(image, kernel):
    return jax.lax.conv(image, kernel, (1, 1), "VALID")


SIZES = {"vocab_size": 200, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 40}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"remat": "full", "attention_block": 16}, {"tied": False, "window": 8}])
def test_a_step_is_counted_as_the_formula_says(settings, micro_batches):
    teacher = DecoderConfig(**{**SIZES, **settings, "layers": 5})
    student = DecoderConfig(**{**SIZES, **settings, "dropout": 0.1})
    run = Distillation(
        decoder(student), OnlineTeacher(decoder(teacher)), Objective((WeightedTerm(ForwardKL()),)),
        make_mapper("shard_map", "sp2_tp4"), FusedHead(chunk=16),
    )  # fmt: skip
    shape = (micro_batches, 2, 64)
    whole = {name: np.zeros(shape, np.int32) for name in ("tokens", "labels", "positions", "segments")}
    counted = step_flops(run, Batch(mask=np.zeros(shape, bool), **whole))
    assert counted == analytic_flops(student, teacher, 2 * micro_batches, 64)


@pytest.mark.parametrize(
    ("kind", "dtype", "tera"),
    [
        ("TPU v4", "bfloat16", 275), ("TPU v5 lite", "bfloat16", 197), ("TPU v5p", "bfloat16", 459),
        ("TPU v5", "bfloat16", 459), ("TPU v6 lite", "bfloat16", 918), ("TPU v6e", "float32", None),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312), ("NVIDIA H100 80GB HBM3", "float16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756), ("NVIDIA H200", "float32", 494), ("NVIDIA B200", "bfloat16", 2250),
        ("cpu", "float32", None), ("TPU v4 lite", "bfloat16", None), ("NVIDIA H200", "float64", None),
    ],
)  # fmt: skip
def test_peaks(kind, dtype, tera):
    assert published_peak(kind, dtype) == (None if tera is None else tera * 1e12)
