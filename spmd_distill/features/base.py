"""What a loss inside the network is, and what one gets: two models' arrays at one pair of layers, on one shard.

A loss returns ONE number: the sum, over the valid tokens of this shard's rows, of what each of them costs. The
objective divides by the valid tokens of the whole optimizer step, as it does for divergences. So a loss must never
average over a batch, and nothing may cross from one document to another: then neither padding, packing, micro-batches
nor the number of shards can change it.

Arrays lie as the layout has them, and are never gathered whole:

    tap                                   shape             over `model`
    block_input ... final_norm            [B, Ls, D]        equal on every shard, Ls = L; or cut along the sequence
    queries, keys, values                 [B, L, heads, C]  each shard's own heads (`heads.head_plan`)

`Tokens.spread` and `Tokens.by_width` cut the first kind further, by tokens or by channels, so that shards share the
work instead of repeating it; `Tokens.total` adds up. Gradients follow the rule of `collectives`: what is equal on all
shards has a gradient that is equal on all shards.
"""

import abc
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from spmd_distill.collectives import all_to_all, axis_index, axis_size, reduce_from, split_to
from spmd_distill.divergences import snake_case
from spmd_distill.errors import UserError
from spmd_distill.models.base import Shard


@struct.dataclass
class Side:
    """One of the two models at one layer."""

    taps: dict[str, jax.Array]
    """Of every tap point that the loss names, the array that passed there."""
    config: Any = struct.field(pytree_node=False)
    """Its `DecoderConfig`: width, heads, kv_heads, head_dim, attention_scale, attention_softcap."""
    window: Int[Array, ""] | None = None
    """How many tokens a token of this layer sees, itself included; None for all before it."""


@struct.dataclass
class Tokens:
    """The rows that a shard body has: which tokens belong together, and which of them count."""

    segments: Int[Array, "B L"]
    """Which document of its row a token belongs to, from 1; 0 is padding."""
    valid: Bool[Array, "B L"]
    """Which tokens count."""
    shard: Shard = struct.field(pytree_node=False)

    @property
    def sequence_sharded(self) -> bool:
        """Whether arrays between blocks hold this shard's part of the sequence alone."""
        return self.shard.layout.sequence_sharded and self.shard.tensor_parallel > 1

    def spread(self, x: Float[Array, "B Ls D"]) -> Float[Array, "B Lm D"]:
        """Whole channels of this shard's own tokens: its part of the sequence, padded with zeros to cut evenly.

        `own` cuts what belongs to tokens in the same way. What every shard holds whole and applies to its own tokens
        (a projection) must go through ``copy_to(w, "model")``.
        """
        if self.sequence_sharded:
            return x
        return split_to(_padded(x, 1, axis_size("model")), "model", 1)

    def by_width(self, x: Float[Array, "B Ls D"]) -> Float[Array, "B L Dm"]:
        """All tokens, and this shard's own channels of them, padded with zeros to cut evenly.

        A sum over channels is then a partial sum: `reduce_from` or `scatter_to` completes it.
        """
        x = _padded(x, 2, axis_size("model"))
        if self.sequence_sharded:
            return all_to_all(x, "model", split=2, concat=1)
        return split_to(x, "model", 2)

    def across(self, x: Float[Array, "B Lm D"]) -> Float[Array, "B Lx Dm"]:
        """What `by_width` would give, of an array as `spread` gives it; tokens may follow that fill the last shard."""
        return all_to_all(_padded(x, 2, axis_size("model")), "model", split=2, concat=1)

    def own(self, x: Array) -> Array:
        """Of ``[B, L, ...]``, known to every shard and without a gradient: the tokens that `spread` gives this one."""
        x = _padded(x, 1, axis_size("model"))
        size = x.shape[1] // axis_size("model")
        return jax.lax.dynamic_slice_in_dim(x, axis_index("model") * size, size, 1)

    def here(self, x: Array) -> Array:
        """Of ``[B, L, ...]``: the tokens of an array between blocks, ``[B, Ls, ...]``."""
        return self.own(x) if self.sequence_sharded else x

    def total(self, values: Float[Array, "B Lx"], valid: Bool[Array, "B Lx"], *, shared: bool) -> Float[Array, ""]:
        """The sum of ``values`` over the tokens that are ``valid``; others may hold anything finite.

        ``shared``: every shard of ``model`` has tokens, or parts of values, of its own; otherwise all have the same.
        """
        found = jnp.sum(jnp.where(valid, values, 0), dtype=jnp.promote_types(values.dtype, jnp.float32))
        summed: Any = reduce_from(found, "model") if shared else found
        return summed


class AbstractFeatureLoss(abc.ABC):
    """A loss between what two models hold inside. Subclasses are frozen dataclasses of plain values."""

    unit: ClassVar[str] = "token"
    """``token``: a token's loss depends on it and on the tokens before it in its document alone. ``document``: on all
    of its document."""

    @property
    def name(self) -> str:
        """What metrics and run files call it: the class' name in snake case."""
        return snake_case(type(self))

    @property
    @abc.abstractmethod
    def taps(self) -> tuple[str, ...]:
        """Names of the tap points that it needs, of both models (see `models.taps.TAPS`)."""

    @property
    def at_end(self) -> bool:
        """Whether it looks behind all layers: then there is one pair, the ends of both models."""
        return "final_norm" in self.taps

    def check(self, student: Any, teacher: Any) -> None:  # noqa: B027 (most fit any two models)
        """Raise `UserError` where the two `DecoderConfig`s cannot be compared: the sizes found, and what would fit."""

    def declare(self, rngs: nnx.Rngs, student: Any, teacher: Any, pairs: int) -> dict[str, nnx.Param]:
        """Parameters of its own for ``pairs`` pairs of layers, by `models.base.declare`; none for most.

        Those declared with ``stack=pairs`` reach `__call__` as the pair's own slice, others whole.
        """
        return {}

    @abc.abstractmethod
    def __call__(
        self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """The sum over valid tokens at one pair of layers, inside a shard body: equal on every shard of ``model``.

        Differentiable in the student's taps and in ``params``, which are in compute type and whole along ``embed``;
        the teacher's taps have no gradient. Finite, with finite gradients, whatever finite numbers come in.
        """


HIDDEN = ("block_input", "block_output", "attention_output", "mlp_output", "final_norm")
"""Tap points whose arrays are a hidden state a token, ``[B, Ls, D]``."""


class AbstractHiddenLoss(AbstractFeatureLoss):
    """A loss between hidden states: its field ``at`` is the tap point, one of `HIDDEN`."""

    at: str

    def __post_init__(self):
        """Check the tap point; subclasses check the rest."""
        one_of(self, "at", HIDDEN)

    @property
    def taps(self) -> tuple[str, ...]:
        """The one it is at."""
        return (self.at,)


def one_of(loss: AbstractFeatureLoss, setting: str, names: Collection[str]) -> None:
    """Raise `UserError` where a loss' setting is none of ``names``."""
    if (found := getattr(loss, setting)) not in names:
        raise UserError(f"{type(loss).__name__}: {setting} is {found!r}; expected one of {', '.join(names)}.")


def above_zero(loss: AbstractFeatureLoss, setting: str, example: str = "") -> None:
    """Raise `UserError` where a loss' setting is not a finite number above 0."""
    if not (math.isfinite(found := getattr(loss, setting)) and found > 0):
        raise UserError(f"{type(loss).__name__}: {setting} is {found}; expected a number above 0{example}.")


def wide(x: jax.Array) -> jax.Array:
    """In float32, or float64 where it is: what losses are computed in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _padded(x: jax.Array, dim: int, multiple: int) -> jax.Array:
    more = -x.shape[dim] % multiple
    return jnp.pad(x, [(0, more) if i == dim else (0, 0) for i in range(x.ndim)]) if more else x
