"""A program compiled ahead: what it needs, and that it stays the one that was compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_run

from spmd_distill.build import load_text, set_up
from spmd_distill.data import Loader
from spmd_distill.program import abstract_like, compile_program
from spmd_distill.state import compile_train_step


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
    train, _ = load_text(setup)
    step = compile_train_step(setup.run, setup.tx, Loader(train, 4, 2, 0).batch(0))
    layout = setup.run.mapper.layout
    shardings = setup.run.mapper.shardings(setup.run.student.specs(layout))
    held = jax.tree.map(
        lambda x, s: np.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, setup.run.student.abstract, shardings
    )
    parameters = sum(jax.tree.leaves(held))
    assert step.memory is not None
    assert step.memory.aliased >= 3 * parameters, "parameters and both moments are updated in place"
