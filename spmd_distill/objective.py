"""What is minimised: a weighted sum of terms. The ONE place that masks tokens and divides by their number."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from spmd_distill.divergences import AbstractDivergence, AbstractLabelLoss, CrossEntropy, Scheduled, ZLoss, scheduled
from spmd_distill.errors import UserError
from spmd_distill.features import AbstractFeatureLoss, AbstractLayerMap, Compared, Explicit, Inside, Uniform
from spmd_distill.head import FULL, AbstractHead, HeadOutput, Sampled, Support, Term, common_vocabulary
from spmd_distill.models import keys_of_rows
from spmd_distill.types import Batch, Unembedded


@dataclass(frozen=True)
class WeightedTerm:
    """One summand: a divergence, or a loss on the label, with its weight and temperature.

    A divergence's gradient with respect to the logits shrinks as 1/T^2 with its temperature T (Hinton et al. 2015,
    section 2); by default that is undone. `NormalizedLogitMSE` does not depend on T, and `TotalVariation` and
    `SortedLogitULD`, whose gradient does not fade near the minimum, shrink as 1/T: switch the square off for those if
    their T is not 1.
    """

    divergence: AbstractDivergence
    weight: Scheduled = 1.0
    temperature: Scheduled = 1.0
    """Ignored by losses on the label, which are at temperature 1."""
    scale_by_temperature_squared: bool = True

    @property
    def name(self) -> str:
        """What metrics call it."""
        return self.divergence.name

    @property
    def squared(self) -> bool:
        """Whether the weight is multiplied by T^2."""
        return self.scale_by_temperature_squared and not isinstance(self.divergence, AbstractLabelLoss)

    def for_head(self, label: str) -> Term:
        """The term without what moves during training."""
        return Term(self.divergence, None if callable(self.temperature) else float(self.temperature), label)


@dataclass(frozen=True)
class FeatureTerm:
    """One summand: a loss inside the network, at pairs of layers, with its weight. Its value is the mean over pairs."""

    loss: AbstractFeatureLoss
    layers: AbstractLayerMap | tuple[tuple[int, int], ...] = field(default_factory=Uniform)
    """Which layers are compared: a rule, or pairs (student's, teacher's). A loss at the final norm is at the end."""
    weight: Scheduled = 1.0

    @property
    def name(self) -> str:
        """What metrics call it."""
        return self.loss.name

    def between(self, label: str, student: int, teacher: int) -> Compared:
        """The loss at its pairs, for models of so many layers. Raises `UserError` where the layer map has none."""
        if self.loss.at_end:
            return Compared(label, self.loss, ((student - 1, teacher - 1),))
        layers = self.layers if isinstance(self.layers, AbstractLayerMap) else Explicit(self.layers)
        try:
            return Compared(label, self.loss, layers.pairs(student, teacher))
        except UserError as error:
            raise UserError(f"{label}: {error}") from error


@dataclass(frozen=True)
class Objective:
    """A weighted sum of losses, averaged over the valid tokens of the whole optimizer step.

    Terms are losses on tokens' distributions, which a head computes, and losses inside the network (`FeatureTerm`).
    ``support`` says which tokens of the vocabulary the separable divergences look at, ``vocab_size`` how many tokens
    the two models share (default: the smaller vocabulary, with a warning where they differ).
    """

    terms: tuple[WeightedTerm | FeatureTerm, ...]
    support: Support = FULL
    vocab_size: int | None = None

    @classmethod
    def mix(
        cls,
        divergence: AbstractDivergence,
        alpha: Scheduled = 0.9,
        temperature: Scheduled = 1.0,
        *,
        label_smoothing: Scheduled = 0.0,
        z_loss: Scheduled = 0.0,
        support: Support = FULL,
        vocab_size: int | None = None,
    ) -> "Objective":
        """``alpha T^2 D(teacher, student; T) + (1 - alpha) CE(labels)``, Hinton et al. 2015 (arXiv:1503.02531).

        ``z_loss`` is the weight of a third term. A part whose weight is the number 0 is left out of the program.
        """
        rest: Scheduled = _Rest(alpha) if callable(alpha) else 1 - alpha
        parts = (
            WeightedTerm(divergence, alpha, temperature),
            WeightedTerm(CrossEntropy(label_smoothing), rest),
            WeightedTerm(ZLoss(), z_loss),
        )
        return cls(tuple(t for t in parts if callable(t.weight) or t.weight != 0), support, vocab_size)

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for every term: its loss', numbered from the second of the same name on."""
        names = [t.name for t in self.terms]
        before = [names[:i].count(name) for i, name in enumerate(names)]
        return tuple(name if not n else f"{name}_{n + 1}" for name, n in zip(names, before, strict=True))

    @property
    def on_tokens(self) -> dict[str, WeightedTerm]:
        """The terms that a head computes, by label."""
        named = zip(self.labels, self.terms, strict=True)
        return {label: t for label, t in named if isinstance(t, WeightedTerm)}

    @property
    def features(self) -> dict[str, FeatureTerm]:
        """The terms inside the network, by label."""
        return {label: t for label, t in zip(self.labels, self.terms, strict=True) if isinstance(t, FeatureTerm)}

    def inside(self, student: Any, teacher: Any) -> Inside:
        """The losses inside the network between two models of these `DecoderConfig`s; there may be none.

        Raises `UserError` where one cannot be had of these models, or one of them is none of ours.
        """
        for model, config in (("student", student), ("teacher", teacher)):
            if self.features and config is None:
                raise UserError(
                    f"The objective has a term inside the network ({next(iter(self.features))}), and the {model} is no "
                    f"model of ours: nobody can look inside. Take a decoder of this library, or leave the term out."
                )
        found = (t.between(label, student.layers, teacher.layers) for label, t in self.features.items())
        return Inside(tuple(found), student, teacher)

    def coefficients(self, step: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Weights and temperatures of the terms on tokens at an optimizer step, ``[terms]`` each."""
        terms = self.on_tokens.values()
        temperatures = [_at(t.temperature, step, dtype) for t in terms]
        weights = [
            _at(t.weight, step, dtype) * (temp * temp if t.squared else 1)
            for t, temp in zip(terms, temperatures, strict=True)
        ]
        if not weights:
            return jnp.zeros(0, dtype), jnp.zeros(0, dtype)
        return jnp.stack(weights), jnp.stack(temperatures)

    def parameters(self, step: jax.Array, dtype: Any) -> tuple[dict[str, jax.Array], ...]:
        """The scheduled parameters of each divergence at an optimizer step."""
        return tuple(
            {name: _at(value, step, dtype) for name, value in scheduled(t.divergence).items()}
            for t in self.on_tokens.values()
        )

    def __call__(
        self,
        head: AbstractHead,
        student: Unembedded,
        teacher: Unembedded,
        batch: Batch,
        step: jax.Array,
        count: jax.Array,
        *,
        agreement: bool,
        batch_axes: tuple[str, ...],
        vocab_axes: tuple[str, ...] = ("model",),
        keys: jax.Array | None = None,
        scale: jax.Array | None = None,
        inside: Mapping[str, jax.Array] = MappingProxyType({}),
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """This shard's share of the loss (its sum over valid tokens / ``count``) and the sums behind the metrics.

        ``inside`` are the sums of the terms inside the network, by label (`Inside`).

        ``count`` is the GLOBAL number of valid tokens of the optimizer step: adding the shares of all shards and
        micro-batches gives the mean, whatever the data-parallel width, accumulation, packing or padding. ``keys``
        ``[B]`` (`keys_of_rows`) drive a sampled support; without them it is drawn from the step's number. ``scale``
        multiplies the loss (and with it what a head keeps of its gradient), and none of the sums.
        """
        dtype = jnp.promote_types(student.hidden.dtype, jnp.float32)
        weights, temperatures = self.coefficients(step, dtype)
        # Divided before the head and not after it: a head's gradients are then final, and need no second copy.
        weights = weights / jnp.maximum(count, 1).astype(dtype)
        if scale is not None:
            weights = weights * scale.astype(dtype)
        terms = tuple(t.for_head(label) for label, t in self.on_tokens.items())
        if jnp.promote_types(teacher.hidden.dtype, jnp.float32) != dtype:  # one of them is float64
            teacher = jax.tree.map(lambda x: x.astype(dtype), teacher)
        student, teacher = common_vocabulary(student, teacher, terms, self.vocab_size)
        if not terms:  # the head has metrics to compute, and no gradient
            student = jax.lax.stop_gradient(student)
        labels, mask = batch.labels.reshape(-1), batch.mask.reshape(-1)
        out: HeadOutput = head(
            student,
            teacher,
            labels,
            mask,
            terms,
            weights,
            temperatures,
            agreement=agreement,
            parameters=self.parameters(step, dtype),
            support=self.support,
            uniforms=self._uniforms(keys, step, batch.mask.shape, batch_axes),
            vocab_axes=vocab_axes,
            batch_axes=batch_axes,
        )
        loss, sums = out.loss, dict(out.sums)
        for label, term in self.features.items():
            weight = _at(term.weight, step, dtype) / jnp.maximum(count, 1).astype(dtype)
            value = inside[label].astype(dtype)
            loss = loss + value * (weight if scale is None else weight * scale.astype(dtype))
            sums[label] = jax.lax.stop_gradient(value)
        total = jax.lax.stop_gradient(loss) * jnp.maximum(count, 1)
        return loss, {"loss": total if scale is None else total / scale.astype(total.dtype), **sums}

    def _uniforms(
        self, keys: jax.Array | None, step: jax.Array, shape: tuple[int, ...], batch_axes: tuple[str, ...]
    ) -> jax.Array | None:
        """Random numbers ``[N, draws]`` for a sampled support, each from its row's key and its column in the row."""
        if not isinstance(self.support, Sampled):
            return None
        draws, (rows, length) = self.support.draws, shape
        if keys is None:
            keys = keys_of_rows(jax.random.fold_in(jax.random.key(0), step), rows, batch_axes)
        apart = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, _APART)
        draw = lambda key, column: jax.random.uniform(jax.random.fold_in(key, column), (draws,))  # noqa: E731
        drawn = jax.vmap(jax.vmap(draw, in_axes=(None, 0)), in_axes=(0, None))(apart, jnp.arange(length))
        return drawn.reshape(rows * length, draws)


_APART = 2**31 - 1
"""A column that no row has: what is folded into the keys of rows, so that dropout has other keys than the support."""


@dataclass(frozen=True)
class _Rest:
    """The schedule ``1 - schedule(step)``."""

    schedule: Callable[[Any], Any]

    def __call__(self, step: Any) -> Any:
        return 1 - self.schedule(step)

    def __str__(self) -> str:
        return f"(1 - {self.schedule})"


def _at(value: Scheduled, step: jax.Array, dtype: Any) -> jax.Array:
    return jnp.asarray(value(step) if callable(value) else value, dtype)
