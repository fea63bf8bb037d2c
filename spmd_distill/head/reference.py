"""The oracle: full logits of student and teacher, log-softmax, sums, and JAX's own derivative of all of it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from spmd_distill.collectives import collect_from
from spmd_distill.divergences import CrossEntropy, ForwardKL
from spmd_distill.head.base import AbstractHead, HeadOutput, Term, logits_of
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
        axis: str = "model",
        batch_axes: tuple[str, ...] = (),
    ) -> HeadOutput:
        """See `AbstractHead`."""
        logits_s, logits_t = (
            self._logits(student, mask, axis),
            lax.stop_gradient(self._logits(teacher, mask, axis)),
        )

        def total(values: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(mask, values, 0))

        def cross_entropy(logits: jax.Array) -> jax.Array:
            at_label = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]
            return total(-at_label)

        def divergence(term: Term, temperature: jax.Array | float) -> jax.Array:
            assert not isinstance(term.divergence, CrossEntropy)
            log_t, log_s = (jax.nn.log_softmax(z / temperature) for z in (logits_t, logits_s))
            return total(term.divergence.integrand(log_t, log_s).sum(-1))

        sums, loss = {}, jnp.zeros((), logits_s.dtype)
        for term, weight, temperature in zip(terms, weights, temperatures, strict=True):
            is_ce = isinstance(term.divergence, CrossEntropy)
            value = cross_entropy(logits_s) if is_ce else divergence(term, temperature)
            sums[term.divergence.name] = lax.stop_gradient(value)
            loss = loss + weight * value
        if agreement:
            p, q = jax.nn.softmax(logits_t), lax.stop_gradient(jax.nn.softmax(logits_s))
            sums |= {
                "kl": lax.stop_gradient(divergence(Term(ForwardKL()), 1.0)),
                "ce_student": lax.stop_gradient(cross_entropy(logits_s)),
                "ce_teacher": cross_entropy(logits_t),
                "top1": total((jnp.argmax(logits_s, -1) == jnp.argmax(logits_t, -1)).astype(p.dtype)),
                "acceptance": total(jnp.minimum(p, q).sum(-1)),
            }
        return HeadOutput(loss, sums)

    @staticmethod
    def _logits(model: Unembedded, mask: jax.Array, axis: str) -> jax.Array:
        hidden = jnp.where(mask[:, None], model.hidden, 0)  # a masked row may be NaN: its gradient must not be
        return logits_of(model.transform, hidden, collect_from(model.unembed, axis, 0), 0)[0]
