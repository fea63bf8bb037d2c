"""Losses between relations of tokens, against the papers' formulas written as plain loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_distill.features.cka import linear_cka


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def cka_by_kernels(x: np.ndarray, y: np.ndarray) -> float:
    """Equations 2 and 3 of Kornblith et al. with the centring matrix H written out."""
    h = np.eye(len(x)) - 1 / len(x)
    k, l = x @ x.T, y @ y.T  # noqa: E741

    def hsic(a, b):
        return np.trace(a @ h @ b @ h) / (len(x) - 1) ** 2

    return hsic(k, l) / np.sqrt(hsic(k, k) * hsic(l, l))


@pytest.mark.parametrize(("n", "widths"), [(5, (7, 3)), (40, (6, 9)), (2, (1, 1))])
def test_linear_cka_is_that_of_the_kernels(n, widths):
    r = np.random.default_rng(n)
    x, y = (r.normal(size=(n, d)) + 3 for d in widths)
    expected = cka_by_kernels(x, y)
    assert float(linear_cka(jnp.asarray(x), jnp.asarray(y))) == pytest.approx(expected, rel=1e-9)
    turned, _ = np.linalg.qr(r.normal(size=(widths[0], widths[0])))
    same = linear_cka(jnp.asarray(x), jnp.asarray(1e9 * x @ turned - 5))
    assert float(same) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_linear_cka_in_few_bits(dtype):
    r = np.random.default_rng(0)
    x = jnp.asarray(1e4 * r.normal(size=(300, 20)) + 1e5, dtype)
    y = jnp.asarray(1e-9 * r.normal(size=(300, 30)), dtype)
    expected = cka_by_kernels(np.asarray(x, np.float64), np.asarray(y, np.float64))
    assert float(linear_cka(x, y)) == pytest.approx(expected, rel=1e-4)
    constant = jnp.broadcast_to(x[:1], x.shape)
    assert float(linear_cka(constant, y)) == float(linear_cka(y, 0 * y)) == 0
