"""Parameters that losses inside the network have of their own, as one model: trained, sharded and kept like any.

In a train state they lie beside the student's, under a name that no model uses. An export knows nothing of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from spmd_distill.features.base import AbstractFeatureLoss
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models.base import Model
from spmd_distill.models.foreign import AnyModel
from spmd_distill.sharding import MeshLayout, Specs
from spmd_distill.types import Params

FEATURES_KEY = "features"
"""Where they are among a state's parameters."""


@dataclass(frozen=True)
class Trained:
    """A student and the parameters of losses inside the network, as one tree: what is trained."""

    student: AnyModel
    own: Model | None
    """The losses' parameters, where they have any."""

    @property
    def abstract(self) -> Params:
        """Shape and type of every parameter."""
        return self._both(self.student.abstract, None if self.own is None else self.own.abstract)

    @property
    def axes(self) -> Any:
        """Logical axes of every parameter."""
        return self._both(self.student.axes, None if self.own is None else self.own.axes)

    def specs(self, layout: MeshLayout) -> Specs:
        """Where ``layout`` puts every parameter; raise `UserError` naming one that does not fit."""
        return self._both(self.student.specs(layout), None if self.own is None else self.own.specs(layout))

    def complete(self, params: Params, mapper: AbstractMapper, seed: int) -> Params:
        """The student's parameters with the losses' own beside them: made anew, born sharded, if they are missing."""
        if self.own is None or FEATURES_KEY in params:
            return params
        shardings: Any = mapper.shardings(self.own.specs(mapper.layout))
        return self._both(params, jax.jit(self.own.init, out_shardings=shardings)(jax.random.key(seed)))

    def parted(self, params: Params) -> tuple[Params, Params]:
        """The student's parameters, and the losses' own."""
        if self.own is None:
            return params, {}
        return {name: x for name, x in params.items() if name != FEATURES_KEY}, params[FEATURES_KEY]

    def _both(self, student: Any, own: Any) -> Any:
        return student if self.own is None else {**student, FEATURES_KEY: own}


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
