"""The run file's losses inside the network: which loss, at which layers, how much of it; read without jax."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from spmd_distill.config.numbers import Number, check_names, read_count, read_named, read_number, shown
from spmd_distill.errors import UserError

MAPS = ("uniform", "last", "best")
"""Layer maps by name; all take how many layers of the student they are for."""


@dataclass(frozen=True)
class FeatureConfig:
    """One entry of ``objective.features``; or of ``objective.terms``, among the divergences."""

    feature: Any
    """A loss inside the network: a name, ``{name: {parameter: value}}``, or a class of your own by its import path,
    ``my_module:MyLoss``."""
    layers: Any = "uniform"
    """Layers of the student, each with the teacher's that it is compared with: ``uniform`` (all, by relative depth),
    ``last``, ``best`` (by CKA on a few training rows), the same with a number of layers, ``{uniform: 4}``, or pairs,
    ``[[0, 2], [1, 5]]``, counted from 0."""
    weight: Number = 1.0
    """What the term's mean over valid tokens and pairs of layers is multiplied by; a number or a schedule."""


@dataclass(frozen=True)
class LayersConfig:
    """``uniform``, ``last`` or ``best`` of ``count`` layers (None: as many as the map says); or ``pairs``, as given."""

    kind: str
    count: int | None = None
    pairs: tuple[tuple[int, int], ...] = ()


def read_features(value: Any, where: str = "objective.features") -> list[FeatureConfig]:
    """The entries of ``objective.features``, none where it is null. Raises `UserError` for what is none."""
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{where} is {shown(value)}; expected a list of terms such as {_EXAMPLE}.")
    return [read_feature(entry, f"{where}[{i}]") for i, entry in enumerate(value)]


def read_feature(entry: Any, where: str) -> FeatureConfig:
    """One entry, all of it looked at but the loss' own parameters."""
    if not isinstance(entry, Mapping):
        raise UserError(f"{where} is {entry!r}; expected a mapping such as {_EXAMPLE}.")
    check_names(entry, [f.name for f in fields(FeatureConfig)], where, "setting")
    if "feature" not in entry:
        raise UserError(f"{where} has no feature: {dict(entry)!r}; expected one such as {_EXAMPLE}.")
    found = FeatureConfig(**entry)
    read_loss(found.feature, f"{where}.feature")
    read_layers(found.layers, f"{where}.layers")
    read_number(found.weight, f"{where}.weight")
    return found


def read_loss(value: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    """See `read_named`."""
    return read_named(value, where, "hidden_states", "{hidden_states: {distance: cosine}}", "my_module:MyLoss")


def read_layers(value: Any, where: str) -> LayersConfig:
    """A layer map as it stands in a run file; whether the models have such layers is known when they are opened."""
    if isinstance(value, str) and value in MAPS:
        return LayersConfig(value)
    if isinstance(value, Mapping) and value:
        check_names(value, MAPS, where, "layer map")
        if len(value) == 1:
            ((kind, count),) = value.items()
            return LayersConfig(kind, read_count(count, f"{where}.{kind}"))
    if isinstance(value, list | tuple) and value:
        if all(isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_layer, pair)) for pair in value):
            return LayersConfig("pairs", pairs=tuple((s, t) for s, t in value))
        raise UserError(
            f"{where} is {shown(value)}; expected pairs of a layer of the student and one of the teacher, counted from "
            f"0, such as [[0, 2], [1, 5]]."
        )
    raise UserError(
        f"{where} is {shown(value)}; expected {', '.join(MAPS)}, one of them with a number of layers such as "
        f"{{uniform: 4}}, or pairs such as [[0, 2], [1, 5]]."
    )


_EXAMPLE = "{feature: hidden_states, layers: uniform, weight: 0.1}"


def _is_layer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0
