"""The contract of a head, and what all heads share: from hidden states to logits and their statistics."""

import abc
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spmd_distill.divergences import AbstractDivergence, AbstractRowwise, AbstractSeparable, at
from spmd_distill.errors import UserError
from spmd_distill.head.support import FULL, Support
from spmd_distill.types import LogitTransform, Unembedded

IMPOSSIBLE = -1e30
"""The logit of a token that cannot occur: finite, so that 0 * (logp - logp) is 0 and never NaN."""

LOWEST = -1e6
"""The lowest log-probability a divergence sees. Logits of 1e4 at temperature 0.05 reach -4e5; below lie only tokens
that cannot occur, whose share in a divergence and its gradient must stay finite."""

AGREEMENT = ("kl", "kl_reverse", "ce_student", "ce_teacher", "entropy_student", "entropy_teacher", "top1", "acceptance")
"""Metrics every head can compute in its one pass over the logits, all at temperature 1, summed over valid tokens:
KL(teacher || student) and KL(student || teacher), cross-entropy of both on the labels, the entropy of both, whether
both put the same token first, and the rate sum min(p, q) at which speculative sampling would accept the student's
proposals (Leviathan et al. 2023, arXiv:2211.17192)."""


@dataclass(frozen=True)
class Term:
    """One summand of an objective: what is compared, at which temperature, under which name it is reported."""

    divergence: AbstractDivergence
    static_temperature: float | None = 1.0
    """The temperature if it is known when the program is compiled; None if it moves and arrives as an array."""
    label: str | None = None
    """Name of its sum; the divergence's own by default."""

    @property
    def name(self) -> str:
        """The key of its sum."""
        return self.label or self.divergence.name


@dataclass(frozen=True)
class HeadOutput:
    """What a head returns: sums over this data shard's valid tokens, the same on every shard of ``model``."""

    loss: jax.Array
    """The weighted sum of the terms, a scalar, differentiable in the student's hidden state, unembedding and bias."""
    sums: Mapping[str, jax.Array]
    """Each term's own unweighted sum by its name, and the `AGREEMENT` sums if asked for; no gradient."""


class AbstractHead(abc.ABC):
    """Owns the vocabulary matmul: (hidden, unembedding, targets) -> summed losses. Logits are its own affair."""

    name: str

    @abc.abstractmethod
    def __call__(
        self,
        student: Unembedded,
        teacher: Unembedded,
        labels: Int[Array, " N"],
        mask: Bool[Array, " N"],
        terms: tuple[Term, ...],
        weights: Float[Array, " terms"],
        temperatures: Float[Array, " terms"],
        *,
        agreement: bool,
        parameters: tuple[Mapping[str, Any], ...] = (),
        support: Support = FULL,
        uniforms: Float[Array, "N draws"] | None = None,
        vocab_axes: tuple[str, ...] = ("model",),
        batch_axes: tuple[str, ...] = (),
    ) -> HeadOutput:
        """Sum the objective over valid tokens, inside a shard body.

        ``student`` and ``teacher`` hold hidden states ``[N, D]``, equal on all shards of ``model`` (the two D differ),
        or this shard's columns of the logits (`Unembedded.has_logits`), and this shard's contiguous rows
        ``[V / shards, D]`` of each unembedding, counted over ``vocab_axes`` (first axis outermost). They may share axes
        with ``batch_axes``, those over which tokens are spread, where neither model has logits. Masked tokens may hold
        anything, NaN included. The caller scales a term by its temperature squared, if it wants that, through
        ``weights``. ``parameters`` hold each term's values for its scheduled parameters (`at`), ``uniforms`` the
        random numbers in [0, 1) of a sampled support.

        Raises `UserError` where the two models' vocabularies do not match (`common_vocabulary`).
        """


def accumulator(*arrays: jax.Array) -> jnp.dtype:
    """The type sums are kept in: float32, or float64 where an input is."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def logits_of(
    model: Unembedded,
    hidden: Float[Array, "C D"],
    first_row: int | jax.Array,
    rows: int | None = None,
    dtype: str | None = None,
) -> tuple[Float[Array, "C V"], Float[Array, "..."]]:
    """Logits of a block of the vocabulary that starts at ``first_row`` of ``rows`` (stored in all).

    They are computed in `accumulator` precision and, if asked for, rounded to ``dtype``.
    Also their derivative with respect to ``hidden @ unembed.T + bias``: 0 at rows that are no tokens.
    """
    transform, unembed = model.transform, model.unembed
    acc = accumulator(hidden, unembed)
    if model.has_logits:
        z = hidden.astype(acc)
    else:
        z = lax.dot_general(hidden, unembed.astype(hidden.dtype), (((1,), (1,)), ((), ())), preferred_element_type=acc)
    if model.bias is not None:
        z = z + model.bias.astype(acc)
    z = z * jnp.asarray(transform.logit_scale, acc)
    slope = jnp.asarray(transform.logit_scale, acc)
    if transform.softcap is not None:
        t = jnp.tanh(z / transform.softcap)
        z, slope = t * transform.softcap, slope * (1 - t * t)
    if model.bias is not None:  # -inf forbids a token
        slope = jnp.where(z > IMPOSSIBLE, slope, 0)
        z = jnp.maximum(z, IMPOSSIBLE)
    if rows is None or rows > transform.vocab_size:
        real = first_row + jnp.arange(unembed.shape[0]) < transform.vocab_size
        z, slope = jnp.where(real, z, IMPOSSIBLE), jnp.where(real, slope, 0)
    if dtype is not None:
        kept = jnp.finfo(dtype)
        z = lax.reduce_precision(z, kept.nexp, kept.nmant).astype(dtype)  # for all who look at them alike
    return z, slope


def agreement_of(terms: tuple[Term, ...]) -> tuple[str, ...]:
    """The `AGREEMENT` metrics that mean something: those of one model alone where vocabularies differ."""
    return ("ce_student", "entropy_student", "entropy_teacher") if own_vocabularies(terms) else AGREEMENT


def own_vocabularies(terms: tuple[Term, ...]) -> bool:
    """Whether the objective compares models of different vocabularies: it has a term that can, and none that cannot."""
    compared = [t.divergence for t in terms if isinstance(t.divergence, AbstractSeparable | AbstractRowwise)]
    return bool(compared) and all(isinstance(d, AbstractRowwise) and d.own_vocabularies for d in compared)


def common_vocabulary(
    student: Unembedded, teacher: Unembedded, terms: tuple[Term, ...], vocab_size: int | None = None
) -> tuple[Unembedded, Unembedded]:
    """Cut both models to the tokens they share: to ``vocab_size``, or else to the smaller vocabulary, with a warning.

    Rows from there on get no probability and no gradient. Left alone where every term takes different vocabularies.
    Raises `UserError` where the rows that shards hold do not line up, or ``vocab_size`` is more than a model has.
    """
    if own_vocabularies(terms):
        return student, teacher
    sizes = {"student": student.transform.vocab_size, "teacher": teacher.transform.vocab_size}
    least = min(sizes.values())
    if vocab_size is not None and not 0 < vocab_size <= least:
        raise UserError(
            f"vocab_size is {vocab_size}, but the student has {sizes['student']} tokens and the teacher "
            f"{sizes['teacher']}; expected a number from 1 to {least}."
        )
    if vocab_size is None and len(set(sizes.values())) > 1:
        warnings.warn(
            f"The student has {sizes['student']} tokens, the teacher {sizes['teacher']}: both are cut to the first "
            f"{least}. Say vocab_size={least} (or the tokenizer's size, if that is smaller) to make that explicit.",
            stacklevel=2,
        )
    rows = student.unembed.shape[0], teacher.unembed.shape[0]
    if rows[0] != rows[1]:
        raise UserError(
            f"A shard holds {rows[0]} rows of the student's unembedding and {rows[1]} of the teacher's, so that their "
            f"vocabularies do not line up. Store both with the same number of rows: give the model with fewer rows or "
            f"more rows vocab_rows of the other (`DecoderConfig.vocab_rows`)."
        )

    def cut(model: Unembedded) -> Unembedded:
        transform: LogitTransform = replace(model.transform, vocab_size=least if vocab_size is None else vocab_size)
        return model.replace(transform=transform)  # type: ignore[attr-defined]

    return cut(student), cut(teacher)


def settled(terms: tuple[Term, ...], parameters: tuple[Mapping[str, Any], ...]) -> tuple[AbstractDivergence, ...]:
    """Each term's divergence with the present values of its schedules."""
    values = parameters or ({},) * len(terms)
    return tuple(at(t.divergence, v) for t, v in zip(terms, values, strict=True))
