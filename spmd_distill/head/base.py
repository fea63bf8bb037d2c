"""The contract of a head, and what all heads share: from hidden states to logits and their statistics."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spmd_distill.divergences import AbstractSeparable, CrossEntropy
from spmd_distill.types import LogitTransform, Unembedded

IMPOSSIBLE = -1e30
"""The logit of a token that cannot occur: finite, so that 0 * (logp - logp) is 0 and never NaN."""

AGREEMENT = ("kl", "ce_student", "ce_teacher", "top1", "acceptance")
"""Metrics every head can compute in its one pass over the logits, all at temperature 1, summed over valid tokens:
KL(teacher || student), cross-entropy of both on the labels, whether both put the same token first, and the rate
sum min(p, q) at which speculative sampling would accept the student's proposals (Leviathan et al. 2023)."""


@dataclass(frozen=True)
class Term:
    """One summand of an objective: a divergence at a temperature, or the cross-entropy on the labels."""

    divergence: AbstractSeparable | CrossEntropy
    static_temperature: float | None = 1.0
    """The temperature if it is known when the program is compiled; None if it moves and arrives as an array."""


@dataclass(frozen=True)
class HeadOutput:
    """What a head returns: sums over this data shard's valid tokens, the same on every shard of ``model``."""

    loss: jax.Array
    """The weighted sum of the terms, a scalar, differentiable in the student's hidden state and unembedding."""
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
        axis: str = "model",
        batch_axes: tuple[str, ...] = (),
    ) -> HeadOutput:
        """Sum the objective over valid tokens, inside a shard body.

        ``student`` and ``teacher`` hold hidden states ``[N, D]``, equal on all shards of ``axis`` (the two D differ),
        and this shard's contiguous rows ``[V / shards, D]`` of each unembedding. Masked tokens may hold anything,
        NaN included. Shards of ``batch_axes`` hold other tokens. The caller scales a term by its temperature squared,
        if it wants that, through ``weights``.
        """


def accumulator(*arrays: jax.Array) -> jnp.dtype:
    """The type sums are kept in: float32, or float64 where an input is."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def logits_of(
    transform: LogitTransform,
    hidden: Float[Array, "C D"],
    unembed: Float[Array, "V D"],
    first_row: int | jax.Array,
) -> tuple[Float[Array, "C V"], Float[Array, "C V"]]:
    """Logits of a block of the vocabulary that starts at ``first_row``, in `accumulator` precision.

    Also their derivative with respect to ``hidden @ unembed.T``: 0 at rows that are no tokens.
    """
    acc = accumulator(hidden, unembed)
    raw = lax.dot_general(hidden, unembed.astype(hidden.dtype), (((1,), (1,)), ((), ())), preferred_element_type=acc)
    z = raw * jnp.asarray(transform.logit_scale, acc)
    slope = jnp.full_like(z, transform.logit_scale)
    if transform.softcap is not None:
        t = jnp.tanh(z / transform.softcap)
        z, slope = t * transform.softcap, slope * (1 - t * t)
    real = first_row + jnp.arange(unembed.shape[0]) < transform.vocab_size
    return jnp.where(real, jnp.maximum(z, IMPOSSIBLE), IMPOSSIBLE), jnp.where(real, slope, 0)
