"""Distances of attention maps: which tokens a layer of each model looks at."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from spmd_distill.features.base import AbstractFeatureLoss, Side, Tokens, one_of
from spmd_distill.features.causal import Causal, blank, forward_kl
from spmd_distill.features.heads import Heads, Table, heads_of, of_shard
from spmd_distill.models.attention import Scores, masked_scores

DIVERGENCES = ("kl", "mse")
HEADS = ("mean", "matched")


@dataclass(frozen=True)
class AttentionMaps(AbstractFeatureLoss):
    """How far the attention of a student's layer is from a teacher's: MiniLM's first term (Wang et al. 2020,
    arXiv:2002.10957, section 3.1), or the squared error of TinyBERT (Jiao et al. 2019, arXiv:1909.10351, equation 7),
    here of the maps behind the softmax.

    ``A[h, i, j]`` is what head h of token i gives to token j, as the model itself computes it: scale, soft cap, window;
    only over tokens j up to i in i's document, whether they are valid or not. Of a valid token i it takes

        kl    sum_j A_t[i, j] (log A_t[i, j] - log A_s[i, j])
        mse   sum_j (A_t[i, j] - A_s[i, j])^2

    A sum over j, not a mean: a map's row adds up to one however many tokens there are, so neither padding nor the
    length of a row is in it. Where the two layers have windows of different sizes, both maps are taken over the tokens
    in the smaller one: what only one of them sees has no logarithm in the other.
    """

    divergence: str = "kl"
    """``kl``, forward, or ``mse``."""
    heads: str = "mean"
    """``mean``: one map a model, the mean of all its heads, whatever their numbers. ``matched``: head h of the student
    (of H) with head ``floor(h T / H)`` of the teacher (of T), which is head h where they have the same number; and the
    mean over h of what these cost."""

    def __post_init__(self):
        """Check the names."""
        one_of(self, "divergence", DIVERGENCES)
        one_of(self, "heads", HEADS)

    @property
    def taps(self) -> tuple[str, ...]:
        """Behind norms and rotary positions."""
        return ("queries", "keys")

    def __call__(
        self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """See `AbstractFeatureLoss`. Whole maps of a block of tokens are alive at a time, never of a row."""
        partners = _partners(student.config.heads, teacher.config.heads)
        stay = None
        if self.heads == "matched":
            stay = _places(heads_of("queries", student.config), heads_of("queries", teacher.config), partners)
        pair = _Maps.of(student, tokens), _Maps.of(teacher, tokens)
        if stay is not None:  # every pair of heads is on one shard already
            heads = sum(side.q.shape[2] for side in pair)
            causal = Causal(tokens, heads, pair[0].q.dtype, spread=False)
            weights = of_shard(_weights(heads_of("queries", student.config)))
            queries = [causal.cut(side.q) for side in pair]
            keys = [side.k for side in pair]
            if list(map(list, stay)) != [list(range(pair[1].q.shape[2]))] * len(stay):
                group = queries[1].shape[2] // keys[1].shape[2]
                queries[1] = _take(queries[1], of_shard(stay))
                keys[1] = _take(keys[1], of_shard(np.asarray(stay) // group))
        else:
            causal = Causal(tokens, student.config.heads + teacher.config.heads, pair[0].q.dtype, spread=True)
            weights = jnp.full((student.config.heads,), 1 / student.config.heads)
            queries = [heads_of("queries", side.config).picked(causal.exchange(side.q)) for side in pair]
            keys = [heads_of("keys", side.config).gathered(side.k) for side in pair]
            if self.heads == "matched" and partners != tuple(range(teacher.config.heads)):
                group = teacher.config.heads // teacher.config.kv_heads
                queries[1] = _take(queries[1], np.asarray(partners))
                keys[1] = _take(keys[1], np.asarray(partners) // group)

        def compare(queries: Any, keys: Any, seen: Bool[Array, "B M N"]) -> Float[Array, "B M"]:
            logs = [side.maps(q, k, seen) for side, q, k in zip(pair, queries, keys, strict=True)]
            if self.heads == "mean":
                return self._distance(*(jax.nn.logsumexp(x, axis=1) - np.log(x.shape[1]) for x in logs))
            each = self._distance(*logs)
            return jnp.sum(each * weights.astype(each.dtype)[:, None], axis=1)

        return causal.total(compare, queries, keys, _narrower(student.window, teacher.window))

    def _distance(self, student: Float[Array, "... N"], teacher: Float[Array, "... N"]) -> Float[Array, "..."]:
        if self.divergence == "kl":
            return forward_kl(teacher, student)
        return jnp.sum(jnp.square(jnp.exp(teacher) - jnp.exp(student)), axis=-1)


@dataclass(frozen=True)
class _Maps:
    """A model's queries and keys on this shard, and how maps are made of such."""

    q: jax.Array
    k: jax.Array
    config: Any
    scores: Scores

    @classmethod
    def of(cls, side: Side, tokens: Tokens) -> "_Maps":
        scores = Scores(side.config.attention_scale, side.config.attention_softcap)
        q, k = blank(side.taps["queries"], tokens.valid), blank(side.taps["keys"], tokens.segments > 0)
        return cls(q, k, side.config, scores)

    def maps(
        self, q: Float[Array, "B M H C"], k: Float[Array, "B N K C"], seen: Bool[Array, "B M N"]
    ) -> Float[Array, "B H M N"]:
        """Logarithms of attention maps."""
        return rearrange(jax.nn.log_softmax(masked_scores(self.scores, q, k, seen)), "b k g m n -> b (k g) m n")


def _partners(student: int, teacher: int) -> tuple[int, ...]:
    """Of each head of the student's, the head of the teacher's that it is compared with."""
    return tuple(h * teacher // student for h in range(student))


def _places(student: Heads, teacher: Heads, partners: tuple[int, ...]) -> Table | None:
    """[shards, the student's places]: where on the same shard the partner is; None if one of them is elsewhere."""
    found = []
    for ours, theirs in zip(student.table, teacher.table, strict=True):
        wanted = [partners[h] if h < student.count else None for h in ours]
        if any(t is not None and t not in theirs for t in wanted):
            return None
        # An empty place is compared with any, and weighs nothing.
        found.append(tuple(min(i, len(theirs) - 1) if t is None else theirs.index(t) for i, t in enumerate(wanted)))
    return tuple(found)


def _weights(heads: Heads) -> np.ndarray:
    """[shards, places]: of each head its part in the mean over all."""
    table = np.asarray(heads.table)
    return np.where(table < heads.count, 1 / heads.count, 0)


def _take(x: Array, heads: Any) -> Array:
    return jnp.take(x, heads, axis=2)


def _narrower(a: Int[Array, ""] | None, b: Int[Array, ""] | None) -> Int[Array, ""] | None:
    if a is None or b is None:
        return b if a is None else a
    return jnp.minimum(a, b)
