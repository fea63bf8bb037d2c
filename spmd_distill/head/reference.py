"""The oracle: full logits of student and teacher, log-softmax, sums, and JAX's own derivative of all of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_distill.collectives import collect_from, gather_from
from spmd_distill.divergences import (
    AbstractDivergence,
    AbstractRowwise,
    AbstractSeparable,
    CrossEntropy,
    ForwardKL,
    ReverseKL,
)
from spmd_distill.head.base import (
    LOWEST,
    AbstractHead,
    HeadOutput,
    Term,
    agreement_of,
    common_vocabulary,
    logits_of,
    settled,
)
from spmd_distill.head.support import FULL, Full, Sampled, Support, TopK
from spmd_distill.types import Unembedded


@dataclass(frozen=True)
class ReferenceHead(AbstractHead):
    """For small vocabularies and for checking other heads: memory grows with tokens x vocabulary."""

    name: str = "reference"

    def __call__(
        self,
        student: Unembedded,
        teacher: Unembedded,
        labels: jax.Array,
        mask: jax.Array,
        terms: tuple[Term, ...],
        weights: jax.Array,
        temperatures: jax.Array,
        *,
        agreement: bool,
        parameters: tuple[Mapping[str, Any], ...] = (),
        support: Support = FULL,
        uniforms: jax.Array | None = None,
        vocab_axes: tuple[str, ...] = ("model",),
        batch_axes: tuple[str, ...] = (),
    ) -> HeadOutput:
        """See `AbstractHead`."""
        student, teacher = common_vocabulary(student, teacher, terms)
        z_s = self._logits(student, mask, vocab_axes, batch_axes)
        z_t = lax.stop_gradient(self._logits(teacher, mask, vocab_axes, batch_axes))

        def total(values: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(mask, values, 0))

        def value(divergence: AbstractDivergence, temperature: Any, support: Support = FULL) -> jax.Array:
            if isinstance(divergence, AbstractSeparable):
                log_t, log_s = (jax.nn.log_softmax(z / temperature) for z in (z_t, z_s))
                return total(on_support(divergence, support, log_t, log_s, uniforms))
            if isinstance(divergence, AbstractRowwise):
                return total(divergence.per_token(*(jnp.maximum(z / temperature, LOWEST) for z in (z_t, z_s))))
            if isinstance(divergence, CrossEntropy):
                return cross_entropy(z_s, divergence.label_smoothing)
            return total(jnp.square(jax.nn.logsumexp(z_s, axis=-1)))  # ZLoss

        def cross_entropy(logits: jax.Array, even: Any = 0.0) -> jax.Array:
            logp = jax.nn.log_softmax(logits)
            at_label = jnp.take_along_axis(logp, labels[:, None], axis=-1)[:, 0]
            return total(-(1 - even) * at_label - even * jnp.mean(jnp.maximum(logp, LOWEST), axis=-1))

        sums, loss = {}, jnp.zeros((), z_s.dtype)
        for term, divergence, weight, temperature in zip(
            terms, settled(terms, parameters), weights, temperatures, strict=True
        ):
            found = value(divergence, temperature, support)
            sums[term.name] = lax.stop_gradient(found)
            loss = loss + weight * found
        if agreement:
            p, q = jax.nn.softmax(z_t), jax.nn.softmax(z_s)
            computed = {
                "kl": lambda: value(ForwardKL(), 1.0),
                "kl_reverse": lambda: value(ReverseKL(), 1.0),
                "ce_student": lambda: cross_entropy(z_s),
                "ce_teacher": lambda: cross_entropy(z_t),
                "entropy_student": lambda: total(-jnp.sum(q * jax.nn.log_softmax(z_s), -1)),
                "entropy_teacher": lambda: total(-jnp.sum(p * jax.nn.log_softmax(z_t), -1)),
                "top1": lambda: total((jnp.argmax(z_s, -1) == jnp.argmax(z_t, -1)).astype(p.dtype)),
                "acceptance": lambda: total(jnp.minimum(p, q).sum(-1)),
            }
            sums |= {name: lax.stop_gradient(computed[name]()) for name in agreement_of(terms)}
        return HeadOutput(loss, sums)

    @staticmethod
    def _logits(
        model: Unembedded, mask: jax.Array, vocab_axes: tuple[str, ...], batch_axes: tuple[str, ...]
    ) -> jax.Array:
        hidden = jnp.where(mask[:, None], model.hidden, 0)  # a masked row may be NaN: its gradient must not be
        unembed, bias = model.unembed, model.bias
        for axis in reversed(vocab_axes):  # shards of a batch axis see other tokens: their gradients are summed
            collect: Any = gather_from if axis in batch_axes else collect_from
            unembed = collect(unembed, axis, 0)
            bias = None if bias is None else collect(bias, axis, 0)
            hidden = collect(hidden, axis, 1) if model.has_logits else hidden
        whole = model.replace(unembed=unembed, bias=bias)  # type: ignore[attr-defined]
        return logits_of(whole, hidden, 0)[0][:, : model.transform.vocab_size]


def on_support(
    divergence: AbstractSeparable, support: Support, log_t: jax.Array, log_s: jax.Array, uniforms: jax.Array | None
) -> jax.Array:
    """A separable divergence of every token ``[N]``, from log-probabilities ``[N, V]`` and what `support` says."""
    clip = lambda x: jnp.maximum(x, LOWEST)  # noqa: E731
    if isinstance(support, Full):
        return divergence.integrand(clip(log_t), clip(log_s)).sum(-1)
    if isinstance(support, TopK):
        k = min(support.k, log_t.shape[-1])
        _, tokens = lax.top_k(log_t, k)
        inside = jnp.zeros(log_t.shape, bool).at[jnp.arange(log_t.shape[0])[:, None], tokens].set(True)

        def bucketed(x: jax.Array) -> jax.Array:
            rest = jnp.where(inside, -jnp.inf, x)
            if k == x.shape[-1]:
                rest = jnp.full_like(x, LOWEST)
            listed = jnp.take_along_axis(x, tokens, axis=-1)
            return clip(jnp.concatenate([listed, jax.nn.logsumexp(rest, axis=-1, keepdims=True)], axis=-1))

        return divergence.integrand(bucketed(log_t), bucketed(log_s)).sum(-1)
    assert isinstance(support, Sampled) and uniforms is not None
    fraction, draws = support.teacher_fraction, support.draws
    proposal = fraction * jnp.exp(log_t) + (1 - fraction) * jnp.exp(lax.stop_gradient(log_s))
    proposal = proposal / proposal.sum(-1, keepdims=True)
    points = (jnp.arange(draws) + uniforms) / draws
    tokens = jnp.sum(jnp.cumsum(proposal, axis=-1)[:, None, :] <= points[:, :, None], axis=-1)
    tokens = jnp.minimum(tokens, log_t.shape[-1] - 1)
    r, t, s = (jnp.take_along_axis(x, tokens, axis=-1) for x in (proposal, clip(log_t), clip(log_s)))
    return (divergence.integrand(t, s) / (draws * r)).sum(-1)
