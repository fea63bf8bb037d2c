"""What of a model is kept, and the smaller model made of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_distill.errors import UserError
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models import DecoderConfig, Model, decoder
from spmd_distill.types import Params


@dataclass(frozen=True, eq=False)
class Keep:
    """Numbers of what is kept, ascending; None keeps all. The same count in every layer, not the same numbers."""

    layers: tuple[int, ...] | None = None
    neurons: np.ndarray | None = None
    """Of the MLP, ``[kept layers, neurons]``."""
    kv_heads: np.ndarray | None = None
    """Key/value heads, each with all query heads that share it, ``[kept layers, heads]``."""
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
        if self.kv_heads is not None:
            heads = self.kv_heads.shape[1]
            new = replace(new, kv_heads=heads, heads=heads * (config.heads // config.kv_heads))
        if self.channels is not None and len(self.channels) != config.width:
            check_sizes(config, width=len(self.channels))
            new = replace(new, width=len(self.channels))
        if self.tokens is not None:
            new = replace(new, vocab_size=len(self.tokens), vocab_rows=None)
        return new


def cut(params: Params, model: Model, keep: Keep, mapper: AbstractMapper) -> tuple[Params, Model]:
    """The smaller model and its parameters, taken on the devices; the given ones stay as they are.

    Every array is cut by what its dimensions are called, so that any family's biases, norms and scales follow. Kept
    are numbers as they are: nothing is rescaled. Keeping all of a model is the identity, bit for bit.
    """
    config = model.config
    new = decoder(keep.sizes(config))
    layers = None if keep.layers is None else np.asarray(keep.layers)
    group = config.heads // config.kv_heads
    queries = None
    if keep.kv_heads is not None:
        queries = (keep.kv_heads[..., None] * group + np.arange(group)).reshape(len(keep.kv_heads), -1)
    tokens = None
    if keep.tokens is not None:
        missing = new.config.padded_vocab - len(keep.tokens)
        tokens = np.concatenate([keep.tokens, np.full(missing, config.padded_vocab)])  # past the end: zeros
    whole = {"embed": keep.channels, "act_embed": keep.channels, "vocab": tokens}
    of_a_layer = {"mlp": keep.neurons, "kv_heads": keep.kv_heads, "heads": queries}

    def take(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        if axes[0] == "layers" and layers is not None:
            x = x[layers]
        for dim, axis in enumerate(axes):
            if (index := whole.get(axis)) is not None:
                x = jnp.take(x, index, axis=dim, mode="fill", fill_value=0)
            elif (index := of_a_layer.get(axis)) is not None:
                x = jax.vmap(lambda x, i, dim=dim: jnp.take(x, i, axis=dim - 1))(x, jnp.asarray(index))
        return jnp.copy(x)

    def all_of(params: Params) -> Params:
        return jax.tree.map(take, params, model.axes)

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
) -> Keep:
    """What to keep for the sizes asked for, by an `Importance` (None where only layers or tokens are chosen).

    Raises `UserError` for a size that is larger than the model's or below 1.
    """
    check_sizes(config, mlp, kv_heads, width)
    of = slice(None) if layers is None else list(layers)
    return Keep(
        None if layers is None else tuple(layers),
        None if mlp is None else best(importance.neurons[of], mlp),
        None if kv_heads is None else best(importance.kv_heads[of], kv_heads),
        None if width is None else best(importance.channels, width),
        tokens,
    )


def check_sizes(
    config: DecoderConfig, mlp: int | None = None, kv_heads: int | None = None, width: int | None = None
) -> None:
    """Raise `UserError` for a size that cannot be cut out of a model of ``config``."""
    for name, wanted, there in (
        ("mlp", mlp, config.mlp),
        ("kv_heads", kv_heads, config.kv_heads),
        ("width", width, config.width),
    ):
        if wanted is not None and not 1 <= wanted <= there:
            raise UserError(f"{name} is {wanted}; the teacher has {there}, so expected 1 to {there}.")
    if width not in (None, config.width) and config.embed_scale != 1:
        raise UserError(
            f"The width of a {config.family} model cannot be cut: its embedding is scaled by the root of the width, "
            f"which every reader of the checkpoint takes anew. Cut depth, neurons or heads instead."
        )
