"""What heads and divergences are held against: textbook formulas in float64 numpy, with complex-step derivatives.

Nothing here shares a formula with the library: ``sum p log(p/q)`` and not its Bregman form, mixtures as logarithms of
sums, and derivatives as ``Im f(z + ih) / h``, which has no cancellation and is exact to rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_distill import divergences as dv
from spmd_distill.head import Support, TopK

Rows = np.ndarray
"""[.., V], the student's complex."""


def floor(log_p: Rows) -> Rows:
    """No log-probability below -1e6: there lie only tokens that cannot occur."""
    return np.where(log_p.real > -1e6, log_p, -1e6)


def log_sum_exp(z: Rows) -> Rows:
    top = z.real.max(-1, keepdims=True)
    return (top + np.log(np.exp(z - top).sum(-1, keepdims=True)))[..., 0]


def log_softmax(z: Rows) -> Rows:
    return floor(z - log_sum_exp(z)[..., None])


def kl(log_a: Rows, log_b: Rows) -> Rows:
    return (np.exp(log_a) * (log_a - log_b)).sum(-1)


def mixture(weight: float, log_a: Rows, log_b: Rows) -> Rows:
    """log(weight a + (1 - weight) b)."""
    top = np.maximum(log_a.real, log_b.real)
    return top + np.log(weight * np.exp(log_a - top) + (1 - weight) * np.exp(log_b - top))


def jsd(lp: Rows, lq: Rows, beta: float, convention: str) -> Rows:
    if convention == "interpolation" and beta in (0, 1):
        return kl(lq, lp) if beta else kl(lp, lq)
    m = mixture(beta, lp, lq)
    value = beta * kl(lp, m) + (1 - beta) * kl(lq, m)
    return value if convention == "gkd" else value / (beta * (1 - beta))


def alpha_beta(lp: Rows, lq: Rows, a: float, b: float) -> Rows:
    if a == 0 or b == 0:
        assert a + b == 1
        return kl(lp, lq) if a else kl(lq, lp)
    c, power = a + b, lambda x, y: np.exp(x * lp + y * lq)
    return -(power(a, b) - a / c * power(c, 0) - b / c * power(0, c)).sum(-1) / (a * b)


def absolute(x: Rows) -> Rows:
    return x * np.sign(x.real)


def ascending(x: Rows, width: int) -> Rows:
    found = np.take_along_axis(x, np.argsort(x.real, -1), -1)
    return np.concatenate([np.zeros((*x.shape[:-1], width - x.shape[-1])), found], -1)


def uld(zt: Rows, zs: Rows) -> Rows:
    p, q = np.exp(log_softmax(zt)), np.exp(log_softmax(zs))
    width = max(p.shape[-1], q.shape[-1])
    return absolute(ascending(q, width) - ascending(p, width)).sum(-1)


def standardised_mse(zt: Rows, zs: Rows, epsilon: float) -> Rows:
    def standard(z: Rows) -> Rows:
        z = z - z.mean(-1, keepdims=True)
        return z / np.sqrt((z**2).mean(-1, keepdims=True) + epsilon)

    return ((standard(zs) - standard(zt)) ** 2).mean(-1)


@dataclass(frozen=True)
class Triangular(dv.AbstractSeparable):
    """A divergence of a user's own, with a parameter: the triangular discrimination sum (p - q)^2 / (p + q) at 1."""

    sharpness: dv.Scheduled = 1.0

    def integrand(self, teacher_logp: jax.Array, student_logp: jax.Array) -> jax.Array:
        p, q = jnp.exp(teacher_logp), jnp.exp(student_logp)
        return (p - q) * jnp.tanh(self.sharpness * (teacher_logp - student_logp) / 2)


SEPARABLE: dict[type, Callable[..., Rows]] = {
    dv.ForwardKL: lambda d, p, q: kl(p, q),
    dv.ReverseKL: lambda d, p, q: kl(q, p),
    dv.GeneralizedJSD: lambda d, p, q: jsd(p, q, d.beta, d.convention),
    dv.SkewKL: lambda d, p, q: kl(p, mixture(d.skew, p, q)),
    dv.SkewReverseKL: lambda d, p, q: kl(q, mixture(d.skew, q, p)),
    dv.TotalVariation: lambda d, p, q: absolute(np.exp(p) - np.exp(q)).sum(-1) / 2,
    dv.SquaredHellinger: lambda d, p, q: np.exp(p) @ np.ones(p.shape[-1]) - np.exp((p + q) / 2).sum(-1),
    dv.Alpha: lambda d, p, q: alpha_beta(p, q, d.alpha, 1 - d.alpha),
    dv.AlphaBeta: lambda d, p, q: alpha_beta(p, q, d.alpha, d.beta),
    Triangular: lambda d, p, q: ((np.exp(p) - np.exp(q)) * np.tanh(d.sharpness * (p - q) / 2)).sum(-1),
}
"""Divergence -> (itself, teacher's and student's log-probabilities) -> value of every row."""

TERMS: dict[str, dv.AbstractDivergence] = {name: make() for name, make in dv.DIVERGENCES.items()} | {
    "jsd_02": dv.GeneralizedJSD(0.2),
    "interpolation_02": dv.GeneralizedJSD(0.2, "interpolation"),
    "alpha_08": dv.Alpha(0.8),
    "beta_first": dv.AlphaBeta(0.9, 0.3),
    "smoothed": dv.CrossEntropy(0.1),
    "own": Triangular(0.5),
}
"""Every divergence with its defaults, some with other parameters, and one of a user's own."""


def of_row(divergence: Any, temperature: float, support: Support, labels: np.ndarray) -> Callable[[Rows, Rows], Rows]:
    """(teacher's and student's logits [N, V]) -> the term's value of every token."""
    if isinstance(divergence, dv.CrossEntropy):
        e = divergence.label_smoothing
        return lambda zt, zs: (
            -((1 - e) * np.take_along_axis(log_softmax(zs), labels[:, None], -1)[:, 0] + e * log_softmax(zs).mean(-1))
        )
    if isinstance(divergence, dv.ZLoss):
        return lambda zt, zs: log_sum_exp(zs) ** 2
    if isinstance(divergence, dv.SortedLogitULD):
        return lambda zt, zs: uld(zt / temperature, zs / temperature)
    if isinstance(divergence, dv.NormalizedLogitMSE):
        cut = lambda z: floor(z / temperature)  # noqa: E731
        return lambda zt, zs: standardised_mse(cut(zt), cut(zs), divergence.epsilon)

    def separable(zt: Rows, zs: Rows) -> Rows:
        lp, lq = log_softmax(zt / temperature), log_softmax(zs / temperature)
        if isinstance(support, TopK):
            order = np.argsort(-zt, -1)
            k = min(support.k, zt.shape[-1])
            lp, lq = (bucketed(np.take_along_axis(x, order, -1), k) for x in (lp, lq))
        return SEPARABLE[type(divergence)](divergence, lp, lq)

    return separable


def bucketed(log_p: Rows, k: int) -> Rows:
    """The first k columns and one with what the others hold."""
    rest = log_sum_exp(log_p[:, k:])[:, None] if k < log_p.shape[-1] else np.full_like(log_p[:, :1], -1e6)
    return np.concatenate([log_p[:, :k], rest], -1)


def complex_step(f: Callable[[Rows], Rows], z: Rows) -> tuple[Rows, Rows]:
    """f [N] of rows z [N, V], and its derivative [N, V]."""
    step, rows, width = 1e-40, *z.shape
    moved = z[None] + 1j * step * np.eye(width)[:, None, :]  # [V, N, V]
    found = f(moved.reshape(-1, width)).reshape(width, rows)
    return found[0].real, found.imag.T / step
