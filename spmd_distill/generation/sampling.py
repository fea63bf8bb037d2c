"""Which token comes next: the likeliest or a drawn one, where every shard knows the logits of its rows only.

Nothing of the size of the vocabulary is sent. A choice is an argmax over scores, and so one maximum over the shards. A
token is drawn by adding Gumbel noise to the scaled logits (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030): the
highest sum is a draw from their softmax. The noise of an entry is a function of the seed, the row, the step and the
token's number, so that every layout draws the same tokens.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from spmd_distill.collectives import axis_size, gather_stacked, pmax, psum, shard_index, vary_like
from spmd_distill.errors import UserError
from spmd_distill.head.base import IMPOSSIBLE

Numbers = dict[str, Any]
"""What a program takes as arrays, so that another value compiles nothing: temperature, top_k, top_p, seed."""


class Kind(NamedTuple):
    """What a program is compiled for."""

    greedy: bool
    top_k: bool
    top_p: bool


def _is_real(x: Any) -> bool:
    return not isinstance(x, bool) and isinstance(x, int | float | np.number) and math.isfinite(x)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    The temperature is applied first, then ``top_k``, then ``top_p``, to what ``top_k`` left. Raises `UserError` for
    numbers that cannot be.
    """

    temperature: float = 0.0
    """Logits are divided by it; 0 takes the likeliest token, of equals the one with the lowest id."""
    top_p: float = 1.0
    """Only the smallest set of likeliest tokens whose probability reaches this (Holtzman et al. 2019,
    arXiv:1904.09751); of equals at its edge, those with the lowest ids."""
    top_k: int | None = None
    """Only the so many likeliest tokens; None for all."""

    def __post_init__(self):
        """Check the numbers."""
        if not _is_real(self.temperature) or self.temperature < 0:
            raise UserError(
                f"Sampling: temperature is {self.temperature!r}; expected a number from 0 (greedy) on, such as 0.8."
            )
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise UserError(f"Sampling: top_p is {self.top_p!r}; expected a number above 0 and at most 1.")
        k = self.top_k
        if k is not None and (isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1):
            raise UserError(f"Sampling: top_k is {k!r}; expected a whole number from 1 on, or None.")

    @property
    def kind(self) -> Kind:
        """What has to be compiled for it."""
        greedy = self.temperature == 0
        return Kind(greedy, not greedy and self.top_k is not None, not greedy and self.top_p < 1)

    def numbers(self, seed: int) -> Numbers:
        """The rest."""
        return {
            "temperature": np.float32(self.temperature),
            "top_p": np.float32(self.top_p),
            "top_k": np.int32(min(self.top_k or 1, np.iinfo(np.int32).max)),
            "seed": np.uint32(seed),
        }


GREEDY = Sampling()
"""The likeliest token every time."""


def choose(
    z: Float[Array, "N V"],
    first: Int[Array, ""],
    rows: Int[Array, " N"],
    step: Int[Array, ""],
    kind: Kind,
    numbers: Numbers,
    axes: tuple[str, ...],
) -> Int[Array, " N"]:
    """The next token of N rows, the same on all shards of ``axes``, over which the vocabulary is spread.

    ``z`` are the logits of this shard's V tokens, the first of which has the number ``first``; ``rows`` are the rows'
    numbers in the whole batch and ``step`` how many tokens were chosen before: they decide the noise.
    """
    ids = first + jnp.arange(z.shape[1], dtype=jnp.int32)
    score = z
    if not kind.greedy:
        score = allowed(z, first, kind, numbers, axes) + gumbel(numbers["seed"], rows, step, ids, z.dtype)
    best = pmax(jnp.max(score, axis=1), axes)
    nobody = jnp.iinfo(jnp.int32).max
    offered = jnp.min(jnp.where(score == best[:, None], ids, nobody), axis=1)
    lowest = -pmax(-offered, axes)
    return jnp.where(lowest == nobody, 0, lowest)  # logits that are not numbers have no best


def allowed(
    z: Float[Array, "N V"], first: Int[Array, ""], kind: Kind, numbers: Numbers, axes: tuple[str, ...]
) -> Float[Array, "N V"]:
    """Logits by temperature, less the highest of their row; -inf for the tokens that must not be drawn."""
    never = jnp.asarray(-jnp.inf, z.dtype)
    top = pmax(jnp.max(z, axis=1), axes)[:, None]
    temperature = jnp.maximum(jnp.asarray(numbers["temperature"], z.dtype), jnp.finfo(z.dtype).tiny)
    scaled = jnp.where(z > IMPOSSIBLE, (z - top) / temperature, never)
    if kind.top_k:
        candidates = (scaled > never).astype(z.dtype)
        wanted = jnp.minimum(jnp.asarray(numbers["top_k"], z.dtype), psum(jnp.sum(candidates, axis=1), axes))
        scaled = jnp.where(likeliest(scaled, candidates, wanted, axes), scaled, never)
    if kind.top_p:
        mass = jnp.exp(scaled)
        wanted = jnp.asarray(numbers["top_p"], z.dtype) * psum(jnp.sum(mass, axis=1), axes)
        scaled = jnp.where(likeliest(scaled, mass, wanted, axes), scaled, never)
    return scaled


def likeliest(
    scores: Float[Array, "N V"], weights: Float[Array, "N V"], target: Float[Array, " N"], axes: tuple[str, ...]
) -> Bool[Array, "N V"]:
    """The first tokens, by falling score and then by rising id, whose weights add up to ``target`` in every row.

    Tokens of one score must have one weight. The lowest score of the set is found by bisection over all numbers of its
    type, one sum over the shards a bit; how many of those that share it belong to the set is then a division.
    """
    keys, (lowest, highest) = _ordered(scores)

    def weight(chosen: Bool[Array, "N V"]) -> Float[Array, " N"]:
        return psum(jnp.sum(jnp.where(chosen, weights, 0), axis=1), axes)

    def halve(_: Any, edges: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = edges
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without overflow
        enough = weight(keys >= middle[:, None]) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    edges = (jnp.full_like(target, x, keys.dtype) for x in (lowest, highest))
    edge, _ = lax.fori_loop(0, 8 * keys.dtype.itemsize, halve, vary_like(tuple(edges), target))
    above, equal = keys > edge[:, None], keys == edge[:, None]
    each = pmax(jnp.max(jnp.where(equal, weights, 0), axis=1), axes)
    wanted = jnp.maximum(jnp.ceil((target - weight(above)) / jnp.where(each > 0, each, 1)), 1)
    counts = gather_stacked(jnp.sum(equal, axis=1, dtype=jnp.int32), axes)  # [shards, N]
    earlier = jnp.arange(axis_size(axes))[:, None] < shard_index(axes)
    rank = jnp.sum(jnp.where(earlier, counts, 0), axis=0)[:, None] + jnp.cumsum(equal, axis=1, dtype=jnp.int32)
    return above | (equal & (rank <= wanted[:, None]))


def _ordered(x: Float[Array, "N V"]) -> tuple[Int[Array, "N V"], tuple[int, int]]:
    """Integers in the order of the numbers, and the least and the greatest that there are."""
    kind = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), kind)  # one zero, not two
    limits = jnp.iinfo(kind)
    return jnp.where(bits < 0, bits ^ jnp.asarray(limits.max, kind), bits), (int(limits.min), int(limits.max))


def gumbel(
    seed: Any, rows: Int[Array, " N"], step: Int[Array, ""], ids: Int[Array, " V"], dtype: Any
) -> Float[Array, "N V"]:
    """Standard Gumbel noise for every row and token, whatever shard asks for it.

    64 random bits an entry (a Threefry block, counted by the token's number), so that the tail which decides whether a
    rare token is drawn has all the digits of ``dtype``.
    """
    fold = jax.random.fold_in
    row_key = jax.vmap(lambda row: fold(fold(jax.random.key(seed, impl="threefry2x32"), row), step))
    words = jax.vmap(jax.vmap(fold, (None, 0)), (0, None))(row_key(rows), ids)
    high, low = (jax.random.key_data(words)[..., i].astype(dtype) for i in range(2))
    uniform = high * 2.0**-32 + (low + 0.5) * 2.0**-64
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - jnp.finfo(dtype).epsneg)))
