"""The losses of one chunk of tokens on one shard of the vocabulary: their sums, and the gradient of the logits.

Three passes over the logits ``[C, V]``, and what shards tell each other between them, as a few numbers a token:

1. maxima and sums of exponentials; ONE all-gather of stacked rows makes them the log-sum-exp of both models;
2. all sums over the vocabulary of all terms and metrics; one psum, for terms whose slopes do not cancel
   (`AbstractSeparable.slopes_cancel`);
3. dz, the gradient of the weighted sum of all terms.

`TopK` and `Sampled` supports need another gather to agree on their tokens; row-wise divergences exchange the logits.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from spmd_distill.collectives import psum
from spmd_distill.divergences import AbstractDivergence, AbstractLabelLoss, ForwardKL, ReverseKL
from spmd_distill.head.base import Term, agreement_of
from spmd_distill.head.parts import Chunk, Part
from spmd_distill.head.support import Support, TopK
from spmd_distill.head.vocabulary import statistics, sums_over
from spmd_distill.types import Unembedded


@dataclass(frozen=True)
class Program:
    """Everything about a call of the head that is known when it is compiled."""

    terms: tuple[Term, ...]
    agreement: bool
    support: Support
    vocab_axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    chunk: int

    @property
    def metrics(self) -> tuple[str, ...]:
        """Agreement metrics, in the order their sums come in."""
        return agreement_of(self.terms) if self.agreement else ()

    @property
    def names(self) -> tuple[str, ...]:
        """What the sums are, in order."""
        return tuple(t.name for t in self.terms) + self.metrics

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes over which both tokens and vocabulary are spread: their shards look at each other's tokens."""
        return tuple(a for a in self.vocab_axes if a in self.batch_axes)

    def views(self, temperatures: jax.Array) -> tuple[list[jax.Array], list[int], int | None]:
        """The temperatures logits are looked at through, which of them each term uses, and which is 1, if any."""
        views: list[jax.Array] = []
        of_term: list[int] = []
        one: int | None = None
        for k, term in enumerate(self.terms):
            if term.static_temperature == 1.0 or isinstance(term.divergence, AbstractLabelLoss):
                if one is None:
                    one = len(views)
                    views.append(jnp.ones((), temperatures.dtype))
                of_term.append(one)
            else:
                of_term.append(len(views))
                views.append(temperatures[k])
        if self.agreement and one is None:
            one = len(views)
            views.append(jnp.ones((), temperatures.dtype))
        return views, of_term, one


def chunk_losses(
    program: Program,
    with_gradients: bool,
    student: Unembedded,
    teacher: Unembedded,
    labels: jax.Array,
    live: jax.Array,
    weights: jax.Array,
    temperatures: jax.Array,
    divergences: tuple[AbstractDivergence, ...],
    uniforms: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Sums ``[names]`` of C tokens on this shard, to be added over shards; and dz ``[C, V]`` for ``x @ w.T + b``.

    ``student`` and ``teacher`` hold the hidden states ``[C, D]``. Tokens that are not ``live`` count for nothing.
    """
    views, view_of, one = program.views(temperatures)
    top_k = program.support.k if isinstance(program.support, TopK) else 0
    s, t = statistics((student, teacher), labels, views, program.vocab_axes, top_k)
    chunk = Chunk(s, t, labels, live, views, program.vocab_axes, program.support, uniforms)

    parts = [chunk.part(divergence, view) for divergence, view in zip(divergences, view_of, strict=True)]
    terms = len(parts)
    if program.agreement:
        assert one is not None
        measured = _agreement(chunk, one)
        parts += [measured[name] for name in program.metrics]
    summed = iter(sums_over([x for part in parts for x in part.entries]))
    sums = [[next(summed) for _ in part.entries] for part in parts]
    values = jnp.stack([part.value(*found) for part, found in zip(parts, sums, strict=True)])
    if not with_gradients:
        return values, None

    shares = [
        found[part.slope_sum] if isinstance(part.slope_sum, int) else part.slope_sum
        for part, found in zip(parts[:terms], sums, strict=False)
    ]
    wanted = [x for x in shares if x is not None]
    whole = iter(psum(jnp.stack(wanted), program.vocab_axes) if wanted else ())
    dz = jnp.zeros_like(s.z)
    for k, (part, share) in enumerate(zip(parts[:terms], shares, strict=True)):
        dz += weights[k] * part.gradient(None if share is None else next(whole))
    return values, jnp.where(live[:, None], dz * s.slope, 0)


def _agreement(chunk: Chunk, view: int) -> dict[str, Part]:
    """The metrics of `AGREEMENT`, from logits at temperature 1."""
    s, t = chunk.student, chunk.teacher
    log_q, log_p = chunk.logp("student", view), chunk.logp("teacher", view)

    def over_vocabulary(entry: jax.Array) -> Part:
        return Part((entry,), chunk.share, lambda _: entry)

    def per_token(x: jax.Array) -> Part:
        return Part((), lambda: chunk.once(x), lambda _: log_q)

    measured = {
        "ce_student": per_token(s.lse[view] - s.at_label),
        "entropy_student": over_vocabulary(-jnp.exp(log_q) * log_q),
        "entropy_teacher": over_vocabulary(-jnp.exp(log_p) * log_p),
        "ce_teacher": per_token(t.lse[view] - t.at_label),
        "top1": per_token((s.argmax == t.argmax).astype(log_q.dtype)),
    }
    if s.z.shape == t.z.shape:
        measured |= {
            "kl": over_vocabulary(ForwardKL().integrand(log_p, log_q)),
            "kl_reverse": over_vocabulary(ReverseKL().integrand(log_p, log_q)),
            "acceptance": over_vocabulary(jnp.exp(jnp.minimum(log_p, log_q))),
        }
    return measured
