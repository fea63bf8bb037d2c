"""Two models' hidden states and unembeddings, what a head makes of them, and what the oracle does."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from oracle import Rows, complex_step, kl, log_softmax, of_row

from spmd_distill.collectives import psum, to_varying
from spmd_distill.head import FULL, AbstractHead, HeadOutput, Support, Term
from spmd_distill.mappers import make_mapper
from spmd_distill.sharding import MeshLayout
from spmd_distill.types import LogitTransform, Unembedded


@dataclass
class Problem:
    """Both models' arrays, as a head gets them: N tokens, V of them in PADDED rows of the two unembeddings."""

    hs: np.ndarray
    ws: np.ndarray
    bs: np.ndarray
    ht: np.ndarray
    wt: np.ndarray
    bt: np.ndarray
    labels: np.ndarray
    mask: np.ndarray
    uniforms: np.ndarray
    transforms: tuple[LogitTransform, LogitTransform]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(v for k, v in vars(self).items() if k != "transforms")

    @property
    def exactly(self) -> "Problem":
        """The same numbers as float64."""
        return replace(self, **{k: v.astype(np.float64) for k, v in vars(self).items() if k[0] in "hwb"})


N, WIDTH, TEACHER_WIDTH, V, PADDED, DRAWS = 24, 8, 6, 29, 32, 7
PLAIN = (LogitTransform(V), LogitTransform(V))
DIFFERENT = (LogitTransform(V, 0.7, 9.0), LogitTransform(V, 1.3, 12.0))
"""Logit scale and softcap of Cohere, Granite and Gemma 2, another in the teacher than in the student."""


def problem(seed: int = 0, scale: float = 1.0, dtype: Any = np.float64, transforms: Any = DIFFERENT) -> Problem:
    """Logits of about 3 times ``scale``; of about four valid tokens in five, none on the first of eight data shards."""
    r = np.random.default_rng(seed)
    # Two models of different widths, but where the test makes them one.
    width_t = TEACHER_WIDTH if transforms is DIFFERENT else WIDTH
    shapes = {"hs": (N, WIDTH), "ws": (PADDED, WIDTH), "bs": (PADDED,)}
    shapes |= {"ht": (N, width_t), "wt": (PADDED, width_t), "bt": (PADDED,)}
    given = {k: r.normal(size=shape) * (scale if k[0] == "h" else 1) for k, shape in shapes.items()}
    given = {k: v.astype(dtype) for k, v in given.items()}
    mask = (r.random(N) < 0.8) & (np.arange(N) >= N // 8)
    labels = r.integers(0, V, N).astype(np.int32)
    return Problem(**given, labels=labels, mask=mask, uniforms=r.random((N, DRAWS)), transforms=transforms)


# ---------------------------------------------------------------------------------------------------------------------
# The oracle


def logits_of(h: np.ndarray, w: np.ndarray, b: np.ndarray, t: LogitTransform) -> tuple[Rows, Rows]:
    """In float64 from the first product on, and the derivative by ``h @ w.T + b``; a bias of -inf forbids a token."""
    h, w, b = (x.astype(np.float64) for x in (h, w[: t.vocab_size], b[: t.vocab_size]))
    z = (h @ w.T + np.where(np.isfinite(b), b, 0)) * t.logit_scale
    slope = np.full_like(z, t.logit_scale)
    if t.softcap is not None:
        capped = np.tanh(z / t.softcap)
        z, slope = t.softcap * capped, slope * (1 - capped**2)
    return np.where(np.isfinite(b), z, -1e30), np.where(np.isfinite(b), slope, 0)


def both_logits(p: Problem) -> tuple[tuple[Rows, Rows], tuple[Rows, Rows]]:
    """Of the student and of the teacher."""
    return logits_of(p.hs, p.ws, p.bs, p.transforms[0]), logits_of(p.ht, p.wt, p.bt, p.transforms[1])


@dataclass
class Found:
    """A sum over valid tokens, its gradients by the student's hidden states, unembedding and bias, and all sums."""

    value: float
    hidden: np.ndarray
    unembed: np.ndarray
    bias: np.ndarray
    sums: dict[str, float]

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        return {"d hidden": self.hidden, "d unembed": self.unembed, "d bias": self.bias}


def expected(p: Problem, divergence: Any, temperature: float, support: Support = FULL) -> Found:
    """One term of an objective, its weight 1."""
    (zs, slope), (zt, _) = both_logits(p)
    times, valid = zs.shape[-1], p.mask
    f = of_row(divergence, temperature, support, np.tile(p.labels[valid], times))
    value, dz = complex_step(lambda z: f(np.tile(zt[valid], (times, 1)), z), zs[valid])
    dz = dz * slope[valid]
    hidden, (unembed, bias) = np.zeros(p.hs.shape), (np.zeros(x.shape) for x in (p.ws, p.bs))
    hidden[valid] = dz @ p.ws[:times].astype(np.float64)
    unembed[:times] = dz.T @ p.hs[valid].astype(np.float64)
    bias[:times] = dz.sum(0)
    return Found(float(value.sum()), hidden, unembed, bias, {})


def agreement(p: Problem) -> dict[str, float]:
    """The metrics that every head reports, at temperature 1."""
    (zs, _), (zt, _) = both_logits(p)
    lq, lp = log_softmax(zs)[p.mask], log_softmax(zt)[p.mask]
    labels = p.labels[p.mask, None]
    found = {
        "kl": kl(lp, lq),
        "kl_reverse": kl(lq, lp),
        "ce_student": -np.take_along_axis(lq, labels, -1),
        "ce_teacher": -np.take_along_axis(lp, labels, -1),
        "entropy_student": -kl(lq, np.zeros_like(lq)),
        "entropy_teacher": -kl(lp, np.zeros_like(lp)),
        "top1": lq.argmax(-1) == lp.argmax(-1),
        "acceptance": np.minimum(np.exp(lp), np.exp(lq)),
    }
    return {name: float(np.sum(x)) for name, x in found.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The library


@functools.cache
def program(
    head: AbstractHead,
    mapper: str,
    layout: str,
    *,
    terms: tuple[Term, ...],
    support: Support = FULL,
    transforms: tuple[LogitTransform, LogitTransform] = DIFFERENT,
    gradients: bool = True,
) -> Callable[..., Any]:
    """(problem, weights, temperatures[, parameters]) -> what the head finds.

    One program for all that moves: weights choose a term, so that many terms share a compilation.
    """
    place = MeshLayout.load(layout)
    summed = tuple(a for a in place.batch_axes if a not in place.vocab_axes)

    def body(hs, ws, bs, ht, wt, bt, labels, mask, uniforms, weights, temperatures, parameters):
        def loss(hs, ws, bs):
            out: HeadOutput = head(
                Unembedded(hs, ws, transforms[0], bs), Unembedded(ht, wt, transforms[1], bt),
                labels, mask, terms, weights, temperatures, agreement=True, parameters=parameters, support=support,
                uniforms=uniforms, vocab_axes=place.vocab_axes, batch_axes=place.batch_axes,
            )  # fmt: skip
            return out.loss, out.sums

        ws, bs = to_varying((ws, bs), summed)
        if not gradients:
            return psum(loss(hs, ws, bs), place.batch_axes), hs, ws, bs
        found, (dh, dw, db) = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hs, ws, bs)
        return psum(found, place.batch_axes), dh, psum(dw, summed), psum(db, summed)

    tokens, vocab, bias = place.spec(("batch", None)), place.spec(("vocab", None)), place.spec(("vocab",))
    row, whole, model = place.spec(("batch",)), place.spec(()), (tokens, vocab, bias)
    given = (*model, *model, row, row, tokens, whole, whole, whole)
    run = jax.jit(make_mapper(mapper, place).map(body, given, (whole, *model)))

    def call(p: Problem, weights: Any, temperatures: Any, parameters: Any = ()) -> Found:
        assert p.transforms == transforms
        acc = np.float64 if p.hs.dtype == np.float64 else np.float32
        weights, temperatures = (np.broadcast_to(np.asarray(x, acc), (len(terms),)) for x in (weights, temperatures))
        (loss, sums), dh, dw, db = jax.device_get(run(*p.arrays, weights, temperatures, parameters))
        return Found(float(loss), *(np.asarray(x, np.float64) for x in (dh, dw, db)), jax.tree.map(float, sums))

    return call


def close(found: Any, wanted: Any, bar: float, what: str, least: float = 1e-3) -> None:
    """Relative to the largest entry wanted, or to ``least`` where that is smaller."""
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    error = np.abs(found - wanted).max() / max(np.abs(wanted).max(), least)
    assert error <= bar, f"{what}: off by {error:.2g}, more than {bar:.2g}"
