"""What an optimizer's moments are held in between steps: float32, bfloat16, or eight bits with a scale a block.

The optimizer itself computes in float32 or wider. Rounding to the nearest number would stop a slow moving average: with
a decay of 0.999 a second moment would have to lose a thousandth of itself a step, which is less than half of the
distance of two bfloat16 numbers. So it is rounded up or down by chance, such that the mean is right (Gupta et al. 2015,
arXiv:1502.02551).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float

LEAST_SIZE = 4096
"""Arrays with fewer entries than this stay in float32: norms and biases."""

MOMENTS = (
    "adabelief", "adam", "adamw", "lamb", "lion", "muon", "nadam", "nadamw", "radam", "rmsprop", "sgd", "signum",
)  # fmt: skip
"""Optimizers of optax whose arrays are moving averages of the gradient and its square, which may be rounded."""

BLOCK, LEAST_BLOCK = 256, 16
LEVELS, POWER = 127, 4
"""An entry is ``scale (code / LEVELS)^POWER``. The power spends most codes on small entries: a code is 3 % of the
largest entry of its block, and the smallest is 4e-9 of it (6e-5 in the root of a second moment)."""


@struct.dataclass
class Blocks:
    """An array in eight bits; blocks are equal parts of its last dimension."""

    codes: Any
    """int8, shaped like the array."""
    scales: Any
    """The largest magnitude of every block: float32, ``[..., blocks]``."""


class HeldState(NamedTuple):
    """The state of an optimizer whose moments are held in fewer bits."""

    count: jax.Array
    """Updates done: what random numbers are drawn from."""
    inner: Any


def held_in(tx: optax.GradientTransformation, dtype: str) -> optax.GradientTransformationExtraArgs:
    """``tx``, computing in float32 or wider, with its moments held in ``dtype``: float32, bfloat16 or int8.

    ``tx`` must be made of moving averages (`MOMENTS`) for the latter two. Moments keep the shape, and therefore the
    cut, of their parameters. The arrays of int8 have `LEAST_SIZE` entries or more and a last dimension with a divisor
    from `LEAST_BLOCK` to `BLOCK`; all others stay in float32.
    """
    tx = optax.with_extra_args_support(tx)

    def fresh(params: Any) -> Any:
        return tx.init(_widened(params))

    def init(params: Any) -> Any:
        state = fresh(params)
        return state if dtype == "float32" else HeldState(jnp.int32(0), _packed(state, params, dtype, jnp.int32(0)))

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        wide = _widened(params)
        if dtype == "float32":
            return tx.update(_widened(updates), state, wide, **more)
        kinds = jax.eval_shape(fresh, params)
        inner = jax.tree.map(lambda kind, x: _unpacked(x).astype(kind.dtype), kinds, state.inner)
        updates, inner = tx.update(_widened(updates), inner, wide, **more)
        return updates, HeldState(state.count + 1, _packed(inner, params, dtype, state.count + 1))

    return optax.GradientTransformationExtraArgs(init, update)


def block_of(shape: tuple[int, ...]) -> int | None:
    """The length of a block of an array, or None where the array stays in float32."""
    size = shape[-1] if shape else 0
    fitting = [n for n in range(LEAST_BLOCK, BLOCK + 1) if size % n == 0]
    return max(fitting) if fitting and size and _size(shape) >= LEAST_SIZE else None


def quantised(x: Float[Array, "..."], key: jax.Array, block: int) -> Blocks:
    """An array in eight bits, rounded by chance. What is not 0 does not become 0: a second moment divides."""
    parts = jnp.abs(x).reshape(*x.shape[:-1], -1, block)
    scales = jnp.max(parts, axis=-1)
    share = parts / jnp.where(scales > 0, scales, 1)[..., None]
    low = jnp.clip(jnp.floor(LEVELS * share ** (1 / POWER)), 1, LEVELS - 1)
    below, above = ((low + i) / LEVELS for i in (0, 1))
    chance = (share - below**POWER) / (above**POWER - below**POWER)
    codes = jnp.where(share > 0, low + (jax.random.uniform(key, share.shape, x.dtype) < chance), 0)
    return Blocks((codes.reshape(x.shape) * jnp.sign(x)).astype(jnp.int8), scales.astype(jnp.float32))


def dequantised(x: Blocks) -> Float[Array, "..."]:
    """The array again, in float32."""
    block = x.codes.shape[-1] // x.scales.shape[-1]
    codes = x.codes.astype(jnp.float32).reshape(*x.codes.shape[:-1], -1, block) / LEVELS
    return (jnp.sign(codes) * codes**POWER * x.scales[..., None]).reshape(x.codes.shape)


def rounded(x: Float[Array, "..."], key: jax.Array) -> Float[Array, "..."]:
    """An array in bfloat16, rounded up or down by chance."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = bits + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)


def _packed(state: Any, params: Any, dtype: str, count: jax.Array) -> Any:
    """A state with its moments, the arrays that are shaped like parameters, in ``dtype``."""
    shapes = {x.shape for x in jax.tree.leaves(params)}
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), count), max(len(leaves), 1))

    def pack(x: jax.Array, key: jax.Array) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.shape not in shapes or not x.ndim:
            return x
        if dtype == "bfloat16":
            return rounded(x, key)
        block = block_of(x.shape)
        return x if block is None else quantised(x, key, block)

    return jax.tree.unflatten(tree, [pack(x, key) for x, key in zip(leaves, keys, strict=True)])


def _unpacked(x: Any) -> jax.Array:
    return dequantised(x) if isinstance(x, Blocks) else x


def _widened(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
