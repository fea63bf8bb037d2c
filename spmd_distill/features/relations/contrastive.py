"""A student's token must find its own among the teacher's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from spmd_distill.collectives import copy_to
from spmd_distill.features.base import AbstractHiddenLoss, Side, Tokens, above_zero, one_of
from spmd_distill.features.projection import INITS, PROJECTIONS, check_same_width, declare_projection, projected
from spmd_distill.features.relations.gram import TokenPairs, directions

CHOICES = tuple(name for name in PROJECTIONS if name != "auto")


@dataclass(frozen=True)
class Contrastive(AbstractHiddenLoss):
    """Token i: ``-log softmax_j(cos(s_i W, t_j) / temperature)`` at j = i, over valid tokens j <= i of its document.

    Contrastive representation distillation (Tian et al. 2020, arXiv:1910.10699) in the form of InfoNCE (van den Oord
    et al. 2018, arXiv:1807.03748, eq. 4): to tell the teacher's hidden state of the same token from those of others,
    the student must know what the teacher's has in particular. Negatives are the tokens before it, and not those of
    other rows: these would make the loss depend on what happens to share a micro-batch, on packing and on the number
    of shards, and tokens behind it would make it depend on the future. So the first valid token of a document costs
    nothing, and the value grows with the length of documents: up to log n of n tokens, where nothing is found.

    There is no stored bank of negatives, and no estimate of their number, as there is in the paper.
    """

    at: str = "block_output"
    """The tap point, of hidden states."""
    temperature: float = 0.07
    """What cosines are divided by: the lower, the more the most similar negatives decide."""
    projection: str = "per_layer"
    """``per_layer``: a learned ``[D_s, D_t]`` W for each pair of layers; ``shared``: one for all of them; ``none``."""
    init: str = "orthogonal"
    """What W is born as, by its name in `INITS`: orthogonal, normal, identity."""

    def __post_init__(self):
        super().__post_init__()
        above_zero(self, "temperature", ", such as 0.07")
        one_of(self, "projection", CHOICES)
        one_of(self, "init", INITS)

    def check(self, student: Any, teacher: Any) -> None:
        """See the base class."""
        if self.projection == "none":
            check_same_width(self, student, teacher)

    def declare(self, rngs: nnx.Rngs, student: Any, teacher: Any, pairs: int) -> dict[str, nnx.Param]:
        """``projection``, ``[D_s, D_t]``, for each pair or for all."""
        if self.projection == "none":
            return {}
        return declare_projection(rngs, self.init, student, teacher, None if self.projection == "shared" else pairs)

    def __call__(
        self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """See the base class. Each shard projects its own tokens, and then has its channels of all."""
        s, t = student.taps[self.at], tokens.by_width(teacher.taps[self.at])
        if "projection" in params:
            own: Any = jnp.where(tokens.own(tokens.valid)[..., None], tokens.spread(s), 0)
            w: Any = copy_to(params["projection"], "model")
            s = tokens.across(projected(own, w))
        else:
            s = tokens.by_width(s)
        pairs = TokenPairs(tokens, s.dtype)
        s, t = (directions(pairs.features(x)) for x in (s, t))

        def compare(cosines, _, related, itself):
            # the positive's own logit is taken away first: what is left is the log of a sum of which one summand is 1
            logits = cosines[0] / self.temperature
            others = logits - jnp.sum(jnp.where(itself, logits, 0), -1, keepdims=True)
            return jax.nn.logsumexp(jnp.where(related, others, -1e30), -1)

        return tokens.total(pairs.map(compare, [(s, t)]), pairs.own_valid, shared=True)
