"""Attention a block of queries at a time, inside a window or not, against the formula written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_distill.errors import UserError
from spmd_distill.models import DecoderConfig, attention
from spmd_distill.models.attention import Scores, attend, attend_cached


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


SEGMENTS = np.tile(np.repeat([1, 2, 0], [11, 9, 4]).astype(np.int32), (4, 1))


def inputs(length: int = 24) -> tuple[jax.Array, ...]:
    r = np.random.default_rng(0)
    return tuple(jnp.asarray(r.normal(size=(4, length, heads, 8))) for heads in (6, 3, 3))


def oracle(q, k, v, segments, scale=None, softcap=None, window=None) -> np.ndarray:
    """Token by token in numpy."""
    out = np.zeros(q.shape)
    for b, i, h in np.ndindex(q.shape[:3]):
        first = 0 if window is None else max(i - window + 1, 0)
        seen = [j for j in range(first, i + 1) if segments[b, j] == segments[b, i]]
        z = k[b, seen, h // (q.shape[2] // k.shape[2])] @ q[b, i, h] * (q.shape[-1] ** -0.5 if scale is None else scale)
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        weights = np.exp(z - z.max())
        out[b, i, h] = weights / weights.sum() @ v[b, seen, h // (q.shape[2] // k.shape[2])]
    return out


KINDS = {
    "plain": {},
    "capped": {"scale": 0.7, "softcap": 0.9},
    "window of 1": {"window": 1},
    "window of 3": {"window": 3},
    "window of 10, capped": {"window": 10, "softcap": 2.0},
    "window of 99": {"window": 99},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("block", "scores"), [(24, None), (8, None), (7, None), (4, 1), (2, None)])
def test_attention_is_the_formula(kind, block, scores, monkeypatch):
    """Blocks that divide the length or not, rows at once or one by one; a window as a number and as an array."""
    if scores is not None:
        monkeypatch.setattr(attention, "SCORES", scores)
    how = dict(KINDS[kind])
    window = how.pop("window", None)
    q, k, v = inputs()
    expected = oracle(*map(np.asarray, (q, k, v)), SEGMENTS, window=window, **how)
    segments = jnp.asarray(SEGMENTS)
    run = jax.jit(lambda given: attend(q, k, v, segments, block, Scores(**how), given))
    if window is not None:
        np.testing.assert_allclose(run(jnp.int32(window)), expected, rtol=1e-11, atol=1e-11)
    known = jax.jit(lambda: attend(q, k, v, segments, block, Scores(**how), window))
    np.testing.assert_allclose(known(), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize(("block", "scores"), [(8, None), (7, None), (2, 1), (5, 2 * 6 * 5 * 24 * 8)])
def test_gradients_of_blocks_are_those_of_all_at_once(block, scores, window, monkeypatch):
    if scores is not None:
        monkeypatch.setattr(attention, "SCORES", scores)
    segments = jnp.asarray(SEGMENTS)

    def gradient(block):
        loss = lambda q, k, v: jnp.sum(attend(q, k, v, segments, block, window=window) ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*inputs())

    found, expected = gradient(block), gradient(24)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11), found, expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("block", [24, 7])
def test_jaxs_own_attention_as_a_kernel(block, window):
    """Its softmax is in float32 whatever the input."""
    q, k, v = inputs()
    seen = SEGMENTS > 0
    for scale in (None, 0.3):
        found = attend(q, k, v, jnp.asarray(SEGMENTS), block, Scores(scale, kernel="xla"), window)
        expected = oracle(*map(np.asarray, (q, k, v)), SEGMENTS, window=window, scale=scale)
        np.testing.assert_allclose(found[seen], expected[seen], rtol=1e-5, atol=1e-5)


def test_a_kernel_that_is_not_to_be_had_is_a_users_mistake():
    narrow = tuple(x.astype(jnp.bfloat16) for x in inputs())
    with pytest.raises(UserError, match=r"cudnn is not to be had on cpu .*Choose blockwise"):
        attend(*narrow, jnp.asarray(SEGMENTS), scores=Scores(kernel="cudnn"))
    with pytest.raises(UserError, match="in bfloat16 or float16, found float64"):
        attend(*inputs(), jnp.asarray(SEGMENTS), scores=Scores(kernel="cudnn"))
    with pytest.raises(UserError, match="by xla has no soft cap"):
        DecoderConfig(8, 8, 1, 1, 1, 8, 8, attention="xla", attention_softcap=1.0)


@pytest.mark.parametrize("window", [None, 4])
def test_attention_to_a_cache_is_that_of_the_whole_row(window):
    q, k, v = inputs()
    segments = jnp.asarray(SEGMENTS)
    whole = attend(q, k, v, segments, window=window)
    for begin, count in ((0, 5), (5, 1), (13, 4), (23, 1)):
        part = slice(begin, begin + count)
        unwritten = jnp.arange(24) >= begin + count
        keys, values = (jnp.where(unwritten[None, :, None, None], 1e3, x) for x in (k, v))
        theirs = jnp.where(unwritten, 0, segments)
        found = attend_cached(q[:, part], keys, values, segments[:, part], theirs, begin, window=window)
        np.testing.assert_allclose(found, whole[:, part], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("window", [None, 48])
def test_memory_of_attention_grows_with_the_length_alone(window):
    def compiled(length: int):
        q = jax.ShapeDtypeStruct((1, length, 4, 8), jnp.float32)
        s = jax.ShapeDtypeStruct((1, length), jnp.int32)
        loss = jax.grad(lambda q, k, v, s: jnp.sum(attend(q, k, v, s, 64, window=window) ** 2), (0, 1, 2))
        return jax.jit(loss).lower(q, q, q, s).compile()

    short, long = (compiled(n).memory_analysis().temp_size_in_bytes for n in (512, 2048))
    assert long < 6 * short, (short, long)  # of the square: 16 times


def test_a_window_costs_the_length_times_the_window():
    """Counted in matmul flops of what is traced, loops multiplied out."""

    def flops(length: int) -> float:
        q = jax.ShapeDtypeStruct((1, length, 4, 8), jnp.float32)
        s = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return matmuls(jax.make_jaxpr(lambda q, s: attend(q, q, q, s, 64, window=48))(q, s).jaxpr)

    def matmuls(jaxpr) -> float:
        total = 0.0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                ((contracted, _), _) = equation.params["dimension_numbers"]
                shape = equation.invars[0].aval.shape
                total += 2.0 * np.prod(equation.outvars[0].aval.shape) * np.prod([shape[d] for d in contracted])
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += matmuls(inner) * equation.params.get("length", 1)
        return total

    assert flops(2048) == 4 * flops(512)
    assert flops(2048) == 4 * 2048 * 4 * 8 * (48 + 64)  # of the square: 4 * 2048 * 4 * 8 * 2048
