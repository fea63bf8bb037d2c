"""Two models' arrays at a pair of layers, and what a loss inside the network makes of them under any mapper.

Hidden states are given as `[B, L, D]`, heads as `[B, L, all heads, C]`; the body cuts them as the layout's models do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmd_distill.collectives import axis_index, copy_to, psum, to_varying
from spmd_distill.features import AbstractFeatureLoss, Side, Tokens
from spmd_distill.features.parameters import parameters_of
from spmd_distill.mappers import make_mapper
from spmd_distill.models import Shard
from spmd_distill.models.base import declare
from spmd_distill.models.heads import head_plan
from spmd_distill.sharding import REPLICATED, MeshLayout, sharded_axes

OF_HEADS = {"queries": "queries", "keys": "key_values", "values": "key_values"}
"""Tap points of heads, and the table of a `HeadPlan` that says which a shard has."""


@dataclass(frozen=True)
class Sizes:
    """What a loss may ask of a model's config."""

    width: int = 24
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 6
    attention_scale: float | None = None
    attention_softcap: float | None = None
    param_dtype: str = "float32"

    def shape(self, tap: str) -> tuple[int, ...]:
        """Of one token, whole."""
        count = {"queries": self.heads, "keys": self.kv_heads, "values": self.kv_heads}
        return (count[tap], self.head_dim) if tap in count else (self.width,)


@dataclass(frozen=True, eq=False)
class Arrays:
    """Taps of both models by name, whole, and the rows."""

    student: dict[str, np.ndarray]
    teacher: dict[str, np.ndarray]
    segments: np.ndarray
    valid: np.ndarray
    sizes: tuple[Sizes, Sizes]

    def of(self, **changes: Any) -> "Arrays":
        """Others in their places."""
        return replace(self, **changes)


SEGMENTS = np.array(
    [
        [1] * 9 + [2] * 7,
        [1] * 16,
        [1] * 5 + [2] * 1 + [3] * 6 + [0] * 4,
        [1] * 3 + [0] * 13,
        [0] * 16,
        [1] * 2 + [2] * 14,
        [1] * 12 + [0] * 4,
        [1] * 8 + [2] * 8,
    ]
)
"""Eight rows of 16 tokens: packed, whole, short, empty, a document of one token."""


def arrays(
    loss: AbstractFeatureLoss, student: Sizes, teacher: Sizes, seed: int = 0, dtype: Any = np.float64, scale: float = 1
) -> Arrays:
    """Normal numbers; about a quarter of the tokens do not count, among them some in the middle of a document."""
    r = np.random.default_rng(seed)
    rows = SEGMENTS.shape

    def taps(sizes: Sizes) -> dict[str, np.ndarray]:
        return {tap: (scale * r.normal(size=(*rows, *sizes.shape(tap)))).astype(dtype) for tap in loss.taps}

    valid = (r.random(rows) < 0.75) & (SEGMENTS > 0)
    return Arrays(taps(student), taps(teacher), SEGMENTS.astype(np.int32), valid, (student, teacher))


@dataclass(frozen=True, eq=False)
class Found:
    """The sum over all rows, its gradients by the student's taps (whole) and by the loss' own parameters."""

    value: float
    taps: dict[str, np.ndarray]
    params: dict[str, np.ndarray]


def initial(loss: AbstractFeatureLoss, sizes: tuple[Any, Any], dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """The loss' own parameters for one pair of layers, as they are born."""
    model = parameters_of({"it": (loss, 1)}, *sizes)
    if model is None:
        return {}
    return {k: np.asarray(x, dtype) for k, x in model.init(jax.random.key(0))["it"].items()}


def found(
    loss: AbstractFeatureLoss,
    given: Arrays,
    mapper: str = "vmap",
    layout: str = "single",
    params: Mapping[str, np.ndarray] | None = None,
    windows: tuple[int | None, int | None] = (None, None),
) -> Found:
    """Run the loss in a shard body; ``params`` as `initial` gives them (a leading 1 for those of a pair)."""
    program = compiled(loss, given, mapper, layout, windows)
    params = initial(loss, given.sizes) if params is None else params
    value, taps, grads = jax.device_get(program(given.student, given.teacher, given.segments, given.valid, params))
    return Found(float(value), taps, grads)


def compiled(
    loss: AbstractFeatureLoss,
    given: Arrays,
    mapper: str,
    layout: str,
    windows: tuple[int | None, int | None] = (None, None),
) -> Any:
    """The jitted program that `found` runs: (student's taps, teacher's, segments, valid, params) -> Found's fields."""
    place = MeshLayout.load(layout)
    dtype = next(iter(given.student.values())).dtype
    shard = Shard(place, jnp.dtype(dtype))
    model = parameters_of({"it": (loss, 1)}, *given.sizes)
    param_specs = {} if model is None else model.specs(place)["it"]
    uses = {} if model is None else model.uses(place)["it"]
    axes = {} if model is None else model.axes["it"]

    def local(taps: Mapping[str, jax.Array], sizes: Sizes) -> dict[str, jax.Array]:
        plan, cut = head_plan(sizes.heads, sizes.kv_heads, shard.tensor_parallel), {}
        for name, x in taps.items():
            if name in OF_HEADS:
                table = jnp.asarray(np.asarray(getattr(plan, OF_HEADS[name]), np.int32))[axis_index("model")]
                whole: Any = copy_to(x, "model")
                x = jnp.take(whole, table, axis=2, mode="fill", fill_value=0)
            cut[name] = x
        return cut

    def side(taps: Mapping[str, jax.Array], sizes: Sizes, window: int | None) -> Side:
        return Side(local(taps, sizes), sizes, None if window is None else jnp.int32(window))

    def body(student, teacher, segments, valid, params):
        tokens = Tokens(segments, valid, shard)

        def total(student: Any, params: Any) -> Any:
            whole = shard.materialise(params, uses)
            own = {k: x[0] if axes[k][0] == "layers" else x for k, x in whole.items()}
            return loss(
                side(student, given.sizes[0], windows[0]), side(teacher, given.sizes[1], windows[1]), tokens, own
            )

        missing = {k: tuple(a for a in place.batch_axes if a not in sharded_axes(s)) for k, s in param_specs.items()}
        params = {k: to_varying(x, missing[k]) for k, x in params.items()}
        value, (taps, grads) = jax.value_and_grad(total, (0, 1))(student, params)
        return psum(value, place.batch_axes), taps, {k: psum(g, missing[k]) for k, g in grads.items()}

    spec_of = {tap: place.spec(("batch", None if tap in OF_HEADS else "length", None)) for tap in loss.taps}
    rows = place.spec(("batch", None))
    where = (spec_of, spec_of, rows, rows, param_specs)
    return jax.jit(make_mapper(mapper, place).map(body, where, (REPLICATED, spec_of, param_specs)))


@dataclass(frozen=True)
class Together(AbstractFeatureLoss):
    """A weighted sum of losses in one program; the weights are a parameter, so that any one of them is a value."""

    losses: tuple[AbstractFeatureLoss, ...]

    @property
    def taps(self) -> tuple[str, ...]:
        return tuple(sorted({tap for loss in self.losses for tap in loss.taps}))

    def declare(self, rngs: nnx.Rngs, student: Any, teacher: Any, pairs: int) -> dict[str, nnx.Param]:
        declared = [loss.declare(rngs, student, teacher, pairs) for loss in self.losses]
        own = {f"{i}_{name}": p for i, params in enumerate(declared) for name, p in params.items()}
        return own | {
            "weights": declare(rngs, nnx.initializers.ones, (len(declared),), ("act_embed",), "float32", None)
        }

    def __call__(self, student: Side, teacher: Side, tokens: Tokens, params: Mapping[str, jax.Array]) -> jax.Array:
        total: Any = 0
        for i, loss in enumerate(self.losses):
            own = {name.removeprefix(f"{i}_"): x for name, x in params.items() if name.startswith(f"{i}_")}
            total += params["weights"][i] * loss(student, teacher, tokens, own)
        return total
