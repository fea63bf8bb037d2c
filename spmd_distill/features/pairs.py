"""The losses inside the network that an objective names, for two given models: who is compared, and what it needs.

`Inside` is made once, of configs alone. In a shard body, the two models run with its taps (`student_taps`,
`teacher_taps`), and it turns what they kept into one number a loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from spmd_distill.errors import UserError
from spmd_distill.features.base import AbstractFeatureLoss, Side, Tokens
from spmd_distill.features.layer_maps import Pairs
from spmd_distill.features.parameters import by_pair, parameters_of
from spmd_distill.models.base import Model
from spmd_distill.models.taps import TAPS, Tap, Wanted

UNSEEN = 2**30
"""The window of a layer that sees everything, where others of the same term have one."""


@dataclass(frozen=True)
class Compared:
    """One loss and the pairs of layers that it looks at; its value is the mean over them."""

    label: str
    loss: AbstractFeatureLoss
    pairs: Pairs


@dataclass(frozen=True)
class Inside:
    """All losses inside the network of an objective, between two decoders."""

    compared: tuple[Compared, ...]
    student: Any
    """The student's `DecoderConfig`."""
    teacher: Any

    def __post_init__(self):
        """Raise `UserError` where a loss cannot be had of these two models."""
        for one in self.compared:
            if unknown := set(one.loss.taps) - set(TAPS):
                raise UserError(f"{one.label}: no tap point is called {min(unknown)!r}; known are {', '.join(TAPS)}.")
            try:
                one.loss.check(self.student, self.teacher)
            except UserError as error:
                raise UserError(f"{one.label}: {error}") from error

    @cached_property
    def parameters(self) -> Model | None:
        """Parameters of the losses' own, by label; None where none has any."""
        return parameters_of({c.label: (c.loss, len(c.pairs)) for c in self.compared}, self.student, self.teacher)

    @cached_property
    def student_taps(self) -> Wanted:
        """What the student must keep."""
        return _wanted(self._layers(0))

    @cached_property
    def teacher_taps(self) -> Wanted:
        """What the teacher must keep."""
        return _wanted(self._layers(1))

    def __call__(
        self,
        student: Mapping[str, jax.Array],
        teacher: Mapping[str, jax.Array],
        tokens: Tokens,
        params: Mapping[str, Mapping[str, jax.Array]],
    ) -> dict[str, jax.Array]:
        """For each label: the sum over this shard's valid tokens, averaged over pairs of layers.

        ``student`` and ``teacher`` are what `Model.apply_tapped` returned for the taps, ``params`` this shard's own
        part of `parameters`, as stored.
        """
        whole, axes = params, {}
        if self.parameters is not None:
            whole = tokens.shard.materialise(params, self.parameters.uses(tokens.shard.layout))
            axes = self.parameters.axes
        return {c.label: self._one(c, student, teacher, tokens, whole.get(c.label, {}), axes) for c in self.compared}

    def _one(
        self, c: Compared, student: Any, teacher: Any, tokens: Tokens, params: Mapping[str, jax.Array], axes: Any
    ) -> jax.Array:
        own, shared = by_pair(params, axes.get(c.label, {}))
        sides = [
            (_taken(arrays, c.loss.taps, of, [p[i] for p in c.pairs]), _windows(config, [p[i] for p in c.pairs]))
            for i, (arrays, of, config) in enumerate(
                ((student, self._layers(0), self.student), (teacher, self._layers(1), self.teacher))
            )
        ]

        def at_a_pair(xs: Any) -> jax.Array:
            (mine, near), (theirs, far), own = xs
            return c.loss(Side(mine, self.student, near), Side(theirs, self.teacher, far), tokens, {**own, **shared})

        if len(c.pairs) == 1:
            return at_a_pair(jax.tree.map(lambda x: x[0], (*sides, own)))
        # Computed again in the backward pass: what lives until then are the taps alone.
        return jnp.mean(jax.lax.map(jax.checkpoint(at_a_pair), (*sides, own)))

    def _layers(self, side: int) -> dict[str, tuple[int, ...]]:
        """For each tap point, the layers wanted of the student (0) or the teacher (1)."""
        found: dict[str, set[int]] = {}
        for c in self.compared:
            for tap in c.loss.taps:
                found.setdefault(tap, set()).update(pair[side] for pair in c.pairs)
        return {tap: tuple(sorted(layers)) for tap, layers in found.items()}


def _wanted(layers: Mapping[str, tuple[int, ...]]) -> Wanted:
    return {tap: Tap(layers=of) for tap, of in layers.items()}


def _taken(
    arrays: Mapping[str, jax.Array], taps: Sequence[str], kept: Mapping[str, tuple[int, ...]], layers: Sequence[int]
) -> dict[str, jax.Array]:
    """Of each tap point ``[pairs, ...]``; what was kept itself, where it is that already."""
    found = {}
    for tap in taps:
        places = [kept[tap].index(layer) for layer in layers]
        same = places == list(range(len(kept[tap])))
        found[tap] = arrays[tap] if same else arrays[tap][jnp.asarray(places)]
    return found


def _windows(config: Any, layers: Sequence[int]) -> jax.Array | None:
    local = [config.is_local[layer] for layer in layers]
    if not any(local):
        return None
    return jnp.asarray([config.window if near else UNSEEN for near in local], jnp.int32)
