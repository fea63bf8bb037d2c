"""Relations between tokens as their values, queries or keys have them: MiniLM."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from spmd_distill.errors import UserError
from spmd_distill.features.base import AbstractFeatureLoss, Side, Tokens, one_of
from spmd_distill.features.causal import Causal, blank, forward_kl
from spmd_distill.features.heads import heads_of
from spmd_distill.models.attention import PLAIN, masked_scores

RELATIONS = {
    "values": ("values",),
    "queries": ("queries",),
    "keys": ("keys",),
    "queries_keys_values": ("queries", "keys", "values"),
}
"""By the name that run files use: of which arrays."""


@dataclass(frozen=True)
class MiniLMRelations(AbstractFeatureLoss):
    """How far relations between tokens are from the teacher's: of values as in MiniLM (Wang et al. 2020,
    arXiv:2002.10957, section 3.2), of queries, keys and values as in MiniLMv2 (Wang et al. 2021, arXiv:2012.15828).

    The heads of a layer are put side by side and divided anew into R relation heads of width d, in each model for
    itself; so head counts and widths may differ. With x of such a head,

        r[i, j] = softmax_j(x[i] . x[j] / sqrt(d)),   the loss of token i: sum_j r_t[i, j] log(r_t[i, j] / r_s[i, j])

    over tokens j up to i in i's document, valid or not (the papers' encoders look both ways), then the mean over heads
    and over the arrays. A layer's window is not looked at. Queries and keys are taken behind the rotary positions, so
    that their relations know distances.
    """

    relations: str = "values"
    """One of `RELATIONS`."""
    relation_heads: int | None = None
    """R; it must divide the channels of all heads of both models. None is the largest number that divides both models'
    head counts (for keys and values: those of key/value heads): then no head is divided."""

    def __post_init__(self):
        """Check name and number."""
        one_of(self, "relations", RELATIONS)
        if self.relation_heads is not None and self.relation_heads < 1:
            raise UserError(
                f"MiniLMRelations: relation_heads is {self.relation_heads}; it must be at least 1, or null."
            )

    @property
    def name(self) -> str:
        """See `AbstractFeatureLoss`."""
        return "minilm_relations"

    @property
    def taps(self) -> tuple[str, ...]:
        """See `RELATIONS`."""
        return RELATIONS[self.relations]

    def check(self, student: Any, teacher: Any) -> None:
        """Relation heads must divide both models' channels."""
        for tap in self.taps:
            widths = [_count(tap, config) * config.head_dim for config in (student, teacher)]
            heads = self._relation_heads(tap, student, teacher)
            if any(width % heads for width in widths):
                raise UserError(
                    f"MiniLMRelations: relation_heads is {heads}, but the student's {tap} have {widths[0]} channels a "
                    f"token and the teacher's {widths[1]}; it must divide both: take a divisor of "
                    f"{math.gcd(*widths)}, or null for {math.gcd(_count(tap, student), _count(tap, teacher))}."
                )

    def __call__(
        self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """See `AbstractFeatureLoss`."""
        each = [self._one(tap, student, teacher, tokens) for tap in self.taps]
        return jnp.stack(each).mean()

    def _one(self, tap: str, student: Side, teacher: Side, tokens: Tokens) -> Float[Array, ""]:
        relations = self._relation_heads(tap, student.config, teacher.config)
        pair = [(side.taps[tap], heads_of(tap, side.config)) for side in (student, teacher)]
        shards = tokens.shard.tensor_parallel
        stay = relations % shards == 0 and all(heads.cut_evenly for _, heads in pair)
        causal = Causal(tokens, 2 * (relations // shards if stay else relations), pair[0][0].dtype, spread=not stay)
        local = relations // shards if stay else relations

        def divided(x: Float[Array, "B L H C"]) -> Float[Array, "B L R D"]:
            return x.reshape(*x.shape[:2], local, -1)

        keys = [blank(x, tokens.segments > 0) for x, _ in pair]
        if not stay:
            keys = [heads.gathered(x) for x, (_, heads) in zip(keys, pair, strict=True)]
        keys = [divided(x) for x in keys]
        queries = [causal.cut(blank(x, tokens.valid)) for x in keys]

        def compare(queries: Any, keys: Any, seen: Bool[Array, "B M N"]) -> Float[Array, "B M"]:
            ours, theirs = (
                jax.nn.log_softmax(masked_scores(PLAIN, q, k, seen)[:, :, 0])
                for q, k in zip(queries, keys, strict=True)
            )
            return jnp.sum(forward_kl(theirs, ours), axis=1) / relations

        return causal.total(compare, queries, keys)

    def _relation_heads(self, tap: str, student: Any, teacher: Any) -> int:
        return self.relation_heads or math.gcd(_count(tap, student), _count(tap, teacher))


def _count(tap: str, config: Any) -> int:
    return config.heads if tap == "queries" else config.kv_heads
