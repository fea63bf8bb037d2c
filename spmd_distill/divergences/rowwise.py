"""Divergences that are not sums over the vocabulary: they compare whole rows of logits."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spmd_distill.divergences.base import AbstractRowwise


@dataclass(frozen=True)
class SortedLogitULD(AbstractRowwise):
    """Universal logit distillation, Boizard et al. 2024 (arXiv:2402.12030): for models of different vocabularies.

    Both distributions are sorted and the shorter one is filled up with zeros; the L1 distance of the two is the
    Wasserstein distance between vocabularies whose tokens nobody has matched. Between 0 and 2.
    """

    own_vocabularies: ClassVar[bool] = True

    def per_token(
        self, teacher_logits: Float[Array, "N Vt"], student_logits: Float[Array, "N Vs"]
    ) -> Float[Array, " N"]:
        """Sum |sorted p - sorted q|."""
        p, q = (jnp.sort(jax.nn.softmax(z, axis=-1), axis=-1) for z in (teacher_logits, student_logits))
        width = max(p.shape[-1], q.shape[-1])
        p, q = (jnp.pad(x, ((0, 0), (width - x.shape[-1], 0))) for x in (p, q))  # ascending: zeros in front
        return jnp.sum(jnp.abs(q - p), axis=-1)


@dataclass(frozen=True)
class NormalizedLogitMSE(AbstractRowwise):
    """Mean squared difference of logits that were brought to mean 0 and variance 1, token by token.

    The standardisation of Sun et al. 2024 (arXiv:2403.01878, equation 6): the student need not copy the scale of the
    teacher's logits, nor their temperature. Twice (1 - correlation), between 0 and 4.
    """

    epsilon: float = 1e-6
    """Added to the variance: rows of equal logits have no direction."""

    def per_token(self, teacher_logits: Float[Array, "N V"], student_logits: Float[Array, "N V"]) -> Float[Array, " N"]:
        """Mean (normalised student logits - normalised teacher logits)^2."""

        def standard(z: jax.Array) -> jax.Array:
            centred = z - jnp.mean(z, axis=-1, keepdims=True)
            return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.epsilon)

        return jnp.mean(jnp.square(standard(student_logits) - standard(teacher_logits)), axis=-1)
