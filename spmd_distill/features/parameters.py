"""Parameters that losses inside the network have of their own, as one model: trained, sharded and kept like any."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from spmd_distill.features.base import AbstractFeatureLoss
from spmd_distill.models.base import Model


class _Group(nnx.Module):
    """Parameters, or groups of them, by name."""

    def __init__(self, members: Mapping[str, Any]):
        for name, member in members.items():
            setattr(self, name, member)


def parameters_of(losses: Mapping[str, tuple[AbstractFeatureLoss, int]], student: Any, teacher: Any) -> Model | None:
    """The parameters of losses, by their labels, each for so many pairs of layers; None where they have none.

    ``student`` and ``teacher`` are `DecoderConfig`s.
    """

    def make(rngs: nnx.Rngs) -> nnx.Module:
        declared = {label: loss.declare(rngs, student, teacher, pairs) for label, (loss, pairs) in losses.items()}
        return _Group({label: _Group(params) for label, params in declared.items() if params})

    model = Model(make, None)
    return model if jax.tree.leaves(model.abstract) else None


def by_pair(params: Mapping[str, jax.Array], axes: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, Any], ...]:
    """A loss' parameters in two: those with a slice a pair of layers, and those that all pairs share."""
    stacked = {name: x for name, x in params.items() if axes[name][0] == "layers"}
    return stacked, {name: x for name, x in params.items() if name not in stacked}
