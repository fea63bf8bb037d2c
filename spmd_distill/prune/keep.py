"""What of a model is kept, and the smaller model made of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_distill.errors import UserError
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import DecoderConfig, Model, decoder
from spmd_distill.models.base import path_name
from spmd_distill.types import Params


@dataclass(frozen=True, eq=False)
class Keep:
    """Numbers of what is kept, ascending; None keeps all. The same count in every layer, not the same numbers."""

    layers: tuple[int, ...] | None = None
    neurons: np.ndarray | None = None
    """Of the MLP, ``[kept layers, neurons]``."""
    kv_heads: np.ndarray | None = None
    """Key/value heads, ``[kept layers, kv_heads]``."""
    heads: np.ndarray | None = None
    """Query heads, ``[kept layers, heads]``: as many of each kept key/value head, in its order; None keeps all that
    share one."""
    channels: np.ndarray | None = None
    """Of the hidden state, ``[channels]``."""
    tokens: np.ndarray | None = None
    """Of the vocabulary, ``[tokens]``, in the order of the new ids."""

    def sizes(self, config: DecoderConfig) -> DecoderConfig:
        """The smaller model's config. Raises `UserError` for numbers that the model does not have, or too few."""
        layers = tuple(range(config.layers)) if self.layers is None else self.layers
        if not layers or any(not 0 <= i < config.layers for i in layers):
            raise UserError(f"Layers {list(layers)} were to be kept; expected some of 0 to {config.layers - 1}.")
        new = config.of_layers(layers)
        for name, kept, count, per_layer in (
            ("neurons", self.neurons, config.mlp, True),
            ("kv_heads", self.kv_heads, config.kv_heads, True),
            ("heads", self.heads, config.heads, True),
            ("channels", self.channels, config.width, False),
            ("tokens", self.tokens, config.tokens, False),
        ):
            if kept is None:
                continue
            assert kept.ndim == 1 + per_layer and (not per_layer or len(kept) == len(layers)), (name, kept.shape)
            if not kept.size or kept.min() < 0 or kept.max() >= count:
                raise UserError(f"The {name} to keep are not all of the model's, 0 to {count - 1}.")
        if self.neurons is not None:
            new = replace(new, mlp=self.neurons.shape[1])
        if (queries := self.queries(config)) is not None:
            groups = config.kv_heads if self.kv_heads is None else self.kv_heads.shape[1]
            new = replace(new, heads=queries.shape[1], kv_heads=groups)
        if self.channels is not None:
            width = len(self.channels)
            scale = 1.0 if config.embed_scale == 1 else config.embed_scale / math.sqrt(config.width) * math.sqrt(width)
            new = replace(new, width=width, embed_scale=scale)
        if self.tokens is not None:
            new = replace(new, vocab_size=len(self.tokens), vocab_rows=None)
        same = (new.width, new.heads) == (config.width, config.heads)
        if config.rope.kind == "longrope" and not same and new.width // new.heads != config.head_dim:
            raise UserError(
                f"A {config.family} model with long rotary factors cannot have a width of {new.width} and {new.heads} "
                f"heads of {config.head_dim} channels: readers of its checkpoint take a head's channels to be width / "
                f"heads. Cut both in proportion, or depth and neurons instead."
            )
        return new

    def queries(self, config: DecoderConfig) -> np.ndarray | None:
        """The kept query heads, ``[kept layers, heads]``; None where all are. `UserError` where they fit no group."""
        group = config.heads // config.kv_heads
        if self.heads is None:
            kept = self.kv_heads
            return None if kept is None else (kept[..., None] * group + np.arange(group)).reshape(len(kept), -1)
        kept = np.arange(config.kv_heads)[None] if self.kv_heads is None else self.kv_heads
        each, rest = divmod(self.heads.shape[1], kept.shape[1])
        if rest or (self.heads // group != np.repeat(kept, each, axis=1)).any():
            raise UserError(
                f"The query heads to keep do not share the kept key/value heads: expected as many of each of the "
                f"{kept.shape[1]}, in their order. Query head i shares key/value head i // {group}."
            )
        return self.heads


def cut(params: Params, model: Model, keep: Keep, mapper: AbstractMapper) -> tuple[Params, Model]:
    """The smaller model and its parameters, taken on the devices; the given ones stay as they are.

    Every array is cut by what its dimensions are called, so that any family's biases, norms and scales follow. Keeping
    all of a model is the identity, bit for bit.

    Numbers are kept as they are, with one exception. A norm divides by the root of the mean square, and D' channels of
    D have another mean: its scale is multiplied by ``sqrt(D / D')``, so that channels which carried nothing can go
    without a trace (but for the norm's eps). A family that multiplies its embedding by the root of the width, which
    readers of a checkpoint take anew, has the difference put into the embedding, and taken out again before a tied
    unembedding.
    """
    config = model.config
    new = decoder(keep.sizes(config))
    layers = None if keep.layers is None else np.asarray(keep.layers)
    tokens = None
    if keep.tokens is not None:
        missing = new.config.padded_vocab - len(keep.tokens)
        tokens = np.concatenate([keep.tokens, np.full(missing, config.padded_vocab)])  # past the end: zeros
    whole = {"embed": keep.channels, "act_embed": keep.channels, "vocab": tokens}
    of_a_layer = {"mlp": keep.neurons, "kv_heads": keep.kv_heads, "heads": keep.queries(config)}
    norm = math.sqrt(config.width / new.config.width)
    table = config.embed_scale / new.config.embed_scale

    def factor_of(name: str, axes: tuple[str, ...]) -> float:
        if "act_embed" in axes:
            return norm / table if name == "norm.scale" and config.tied else norm
        return table if name == "embed" else 1.0

    def take(path: Any, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        if axes[0] == "layers" and layers is not None:
            x = x[layers]
        for dim, axis in enumerate(axes):
            if (index := whole.get(axis)) is not None:
                x = jnp.take(x, index, axis=dim, mode="fill", fill_value=0)
            elif (index := of_a_layer.get(axis)) is not None:
                x = jax.vmap(lambda x, i, dim=dim: jnp.take(x, i, axis=dim - 1))(x, jnp.asarray(index))
        if (factor := factor_of(path_name(path), axes)) != 1:
            offset = config.norm_offset if "act_embed" in axes else 0.0
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            x = ((wide + offset) * factor - offset).astype(x.dtype)
        return jnp.copy(x)

    def all_of(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(take, params, model.axes)

    shardings: Any = mapper.shardings(new.specs(mapper.layout))
    return jax.jit(all_of, out_shardings=shardings)(params), new


def evenly(depth: int, count: int) -> tuple[int, ...]:
    """``count`` layers of ``depth``, spread evenly, the first and the last among them."""
    return tuple(int(i) for i in np.linspace(0, depth - 1, count).round())


def best(importance: np.ndarray, count: int) -> np.ndarray:
    """Numbers of the ``count`` largest in the last dimension, ascending; of equals, the first."""
    order = np.argsort(-importance, axis=-1, kind="stable")[..., :count]
    return np.sort(order, axis=-1)


def keep_by_importance(
    config: DecoderConfig,
    importance: Any,
    layers: Sequence[int] | None = None,
    mlp: int | None = None,
    kv_heads: int | None = None,
    width: int | None = None,
    tokens: np.ndarray | None = None,
    heads: int | None = None,
) -> Keep:
    """What to keep for the sizes asked for, by an `Importance` (None where only layers or tokens are chosen).

    Without ``heads``, a key/value head is kept with all query heads that share it; with ``heads``, with the
    ``heads / kv_heads`` best of them. Raises `UserError` for a size that is larger than the model's or below 1, and for
    heads that cannot share the key/value heads evenly.
    """
    check_sizes(config, mlp, kv_heads, width, heads)
    of = slice(None) if layers is None else list(layers)
    groups = None if kv_heads is None else best(importance.kv_heads[of], kv_heads)
    queries, shared = None, config.heads // config.kv_heads
    if heads is not None:
        ranked = importance.heads[of].reshape(-1, config.kv_heads, shared)
        kept = np.tile(np.arange(config.kv_heads), (len(ranked), 1)) if groups is None else groups
        chosen = best(np.take_along_axis(ranked, kept[..., None], axis=1), heads // kept.shape[1])
        queries = (kept[..., None] * shared + chosen).reshape(len(ranked), -1)
    return Keep(
        None if layers is None else tuple(layers),
        None if mlp is None else best(importance.neurons[of], mlp),
        groups,
        queries,
        None if width is None else best(importance.channels, width),
        tokens,
    )


def check_sizes(
    config: DecoderConfig,
    mlp: int | None = None,
    kv_heads: int | None = None,
    width: int | None = None,
    heads: int | None = None,
) -> None:
    """Raise `UserError` for a size that cannot be cut out of a model of ``config``, saying which can."""
    for name, wanted, there in (
        ("mlp", mlp, config.mlp),
        ("kv_heads", kv_heads, config.kv_heads),
        ("heads", heads, config.heads),
        ("width", width, config.width),
    ):
        if wanted is not None and not 1 <= wanted <= there:
            raise UserError(f"{name} is {wanted}; the teacher has {there}, so expected 1 to {there}.")
    groups, shared = kv_heads or config.kv_heads, config.heads // config.kv_heads
    if heads is not None and (heads % groups or heads > groups * shared):
        fitting = ", ".join(str(groups * n) for n in range(1, shared + 1))
        raise UserError(
            f"heads is {heads} with {groups} key/value heads, each of which {shared} query heads share; expected as "
            f"many for each, one of {fitting}."
        )
