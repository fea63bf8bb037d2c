"""The losses of one chunk of tokens on one shard of the vocabulary: their sums, and the gradient of the logits.

Three passes over the logits ``[C, V]``, and what shards tell each other between them, as a few numbers a token:

1. maxima and sums of exponentials; ONE all-gather of stacked rows makes them the log-sum-exp of both models;
2. all sums over the vocabulary of all terms and metrics; one psum, for terms whose slopes do not cancel
   (`AbstractSeparable.slopes_cancel`);
3. dz, the gradient of the weighted sum of all terms.

`TopK` and `Sampled` supports need another gather to agree on their tokens; row-wise divergences exchange the logits.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from spmd_distill.collectives import psum
from spmd_distill.divergences import AbstractDivergence, AbstractLabelLoss, relative_entropy
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
    logits_dtype: str | None = None

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

    def views(self, temperatures: jax.Array) -> tuple[list[jax.Array], list[int], int]:
        """The inverse temperatures to look at logits through, which of them each term uses, and which is 1."""
        known: list[float | None] = []
        colds: list[jax.Array] = []
        of_term: list[int] = []
        for k, term in enumerate(self.terms):
            static = 1.0 if isinstance(term.divergence, AbstractLabelLoss) else term.static_temperature
            if static is None or static not in known:
                known.append(static)
                colds.append(1 / temperatures[k] if static is None else jnp.asarray(1 / static, temperatures.dtype))
            of_term.append(len(known) - 1 if static is None else known.index(static))
        if self.agreement and 1.0 not in known:
            known.append(1.0)
            colds.append(jnp.ones((), temperatures.dtype))
        return colds, of_term, known.index(1.0) if 1.0 in known else -1


def chunk_losses(
    program: Program,
    with_gradients: bool,
    models: Sequence[Unembedded],
    tokens: tuple[jax.Array, ...],
    weights: jax.Array,
    temperatures: jax.Array,
    divergences: tuple[AbstractDivergence, ...],
) -> tuple[jax.Array, jax.Array | None]:
    """Sums ``[names]`` of C tokens on this shard, to be added over shards; and dz ``[C, V]`` for ``x @ w.T + b``.

    ``models`` are student and teacher with the hidden states ``[C, D]``; ``tokens`` are their labels, which of them are
    live (others count for nothing), and the random numbers of a sampled support, if any.
    """
    labels, live, *rest = tokens
    colds, view_of, one = program.views(temperatures)
    top_k = program.support.k if isinstance(program.support, TopK) else 0
    compared = {v for v, d in zip(view_of, divergences, strict=True) if not isinstance(d, AbstractLabelLoss)}
    teacher_views = sorted(compared | ({one} if program.agreement else set()))
    axes, held = program.vocab_axes, program.logits_dtype
    s, t = statistics(models, labels, colds, axes, teacher_views=teacher_views, top_k=top_k, logits_dtype=held)
    chunk = Chunk(s, t, labels, live, axes, program.support, rest[0] if rest else None)

    parts = [chunk.part(divergence, view) for divergence, view in zip(divergences, view_of, strict=True)]
    terms = len(parts)
    if program.agreement:
        measured = _agreement(chunk, one)
        parts += [measured[name] for name in program.metrics]
    summed = iter(sums_over([x for part in parts for x in part.entries], one_operation=False))
    sums = [[next(summed) for _ in part.entries] for part in parts]
    values = jnp.stack([part.value(*found) for part, found in zip(parts, sums, strict=True)])
    if not with_gradients:
        return values, None

    shares = [
        found[part.slope_sum] if isinstance(part.slope_sum, int) else part.slope_sum
        for part, found in zip(parts[:terms], sums[:terms], strict=True)
    ]
    wanted = [x for x in shares if x is not None]
    whole = iter(psum(jnp.stack(wanted), axes) if wanted else ())
    factors = [weights[k] * colds[view] for k, view in enumerate(view_of)]
    by_term = []
    for part, share in zip(parts[:terms], shares, strict=True):
        assert part.gradient is not None
        by_term.append(part.gradient(None if share is None else next(whole)))
    dz = functools.reduce(jnp.add, [f * gradient for f, gradient in zip(factors, by_term, strict=True)])
    return values, jnp.where(live[:, None], dz * s.slope, 0)


def _agreement(chunk: Chunk, view: int) -> dict[str, Part]:
    """The metrics of `AGREEMENT`, from logits at temperature 1."""
    s, t = chunk.student, chunk.teacher
    log_q, log_p, q, p = s.logp(view), t.logp(view), s.prob(view), t.prob(view)

    def over_vocabulary(entry: jax.Array) -> Part:
        return Part((entry,), chunk.share)

    def per_token(x: jax.Array) -> Part:
        return Part((), lambda: chunk.once(x))

    measured = {
        "ce_student": per_token(s.surprise(view)),
        "ce_teacher": per_token(t.surprise(view)),
        "entropy_student": over_vocabulary(-q * log_q),
        "entropy_teacher": over_vocabulary(-p * log_p),
    }
    if s.z.shape == t.z.shape:
        measured |= {
            "kl": over_vocabulary(relative_entropy(p, q, log_p - log_q)),
            "kl_reverse": over_vocabulary(relative_entropy(q, p, log_q - log_p)),
            # The same token first, without a pass that finds out which: is there one where both are at their maximum?
            "top1": over_vocabulary(((s.z >= s.top[:, None]) & (t.z >= t.top[:, None])).astype(q.dtype)),
            "acceptance": over_vocabulary(jnp.minimum(p, q)),
        }
    return measured
