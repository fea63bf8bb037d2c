"""The run file's objective: what may be written there, read without jax.

A setting stays in `ObjectiveConfig` as it was written, so that a run's resolved settings are a run file. The readers
turn it into names, numbers and `Schedule`s, and raise `UserError` for all that is wrong whatever the divergence.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from spmd_distill.config.numbers import (
    Number,
    check_names,
    read_count,
    read_named,
    read_number,
    read_plain,
    read_temperature,
    shown,
)
from spmd_distill.config.objective_features import FeatureConfig, read_feature, read_features
from spmd_distill.errors import UserError


@dataclass(frozen=True)
class ObjectiveConfig:
    """``alpha T^2 divergence(teacher, student; T) + (1 - alpha) cross-entropy(labels) + z_loss logsumexp^2``."""

    divergence: Any = "forward_kl"
    """A name, ``{name: {parameter: value}}``, or a class of your own by its import path, ``my_module:MyDivergence``."""
    alpha: Number = 0.9
    """The divergence's weight; cross-entropy has the rest. A number, or a schedule: ``{linear: [0.9, 0.5, 100]}``."""
    temperature: Number = 1.0
    """What the logits of both models are divided by in the divergence; a number or a schedule."""
    label_smoothing: Number = 0.0
    """The part of the cross-entropy's target that is spread evenly over the vocabulary."""
    z_loss: Number = 0.0
    """The weight of the squared log-sum-exp of the student's logits, which keeps them from drifting."""
    support: Any = "full"
    """Tokens that divergences look at: ``full``, ``{topk: 64}``, ``{sampled: 32}``, or
    ``{sampled: {draws: 32, teacher_fraction: 1.0}}``."""
    terms: Any = None
    """A list that replaces divergence, alpha, temperature, label_smoothing and z_loss: ``[{divergence: ..., weight:
    1.0, temperature: 1.0, scale_by_temperature_squared: true}, ...]``; entries of ``features`` may be among them."""
    features: Any = None
    """A list of losses inside the network, added to the rest: ``[{feature: hidden_states, layers: uniform, weight:
    0.1}, ...]``."""
    vocab_size: int | None = None
    """Tokens of the vocabulary that count; null takes the tokenizer's where these are fewer than the models'."""


@dataclass(frozen=True)
class TermConfig:
    """One entry of ``objective.terms``."""

    divergence: Any
    """As in the section; also ``{ce: {label_smoothing: 0.1}}`` and ``z_loss``, the losses on the labels."""
    weight: Number = 1.0
    """What the term's mean over valid tokens is multiplied by."""
    temperature: Number = 1.0
    """What the logits of both models are divided by."""
    scale_by_temperature_squared: bool = True
    """Multiply the term by the temperature squared, so that its gradient keeps its size."""


@dataclass(frozen=True)
class SupportConfig:
    """``full``; or ``topk`` of ``count`` tokens; or ``sampled`` with ``count`` draws."""

    kind: str
    count: int = 0
    teacher_fraction: float | None = None


def check_objective(config: ObjectiveConfig) -> None:
    """Raise `UserError` for everything that is wrong whatever the divergence and the models."""
    read_support(config.support)
    if config.vocab_size is not None and config.vocab_size < 1:
        raise UserError(f"objective.vocab_size is {config.vocab_size}; it must be at least 1, or null.")
    read_divergence(config.divergence, "objective.divergence")
    read_number(config.alpha, "objective.alpha", 0, 1)
    read_temperature(config.temperature, "objective.temperature")
    read_number(config.label_smoothing, "objective.label_smoothing", 0, 1)
    read_number(config.z_loss, "objective.z_loss", 0)
    read_features(config.features)
    for i, term in enumerate(read_terms(config)):
        if isinstance(term, FeatureConfig):
            continue
        where = f"objective.terms[{i}]"
        read_divergence(term.divergence, f"{where}.divergence")
        read_number(term.weight, f"{where}.weight")
        read_temperature(term.temperature, f"{where}.temperature")


def read_terms(config: ObjectiveConfig) -> list[TermConfig | FeatureConfig]:
    """The entries of ``objective.terms``, none where it is null."""
    if config.terms is None:
        return []
    if not isinstance(config.terms, list | tuple) or not config.terms:
        raise UserError(f"objective.terms is {config.terms!r}; expected a list of terms such as {{divergence: ce}}.")
    for name in ("divergence", "alpha", "temperature", "label_smoothing", "z_loss"):
        default = ObjectiveConfig.__dataclass_fields__[name].default
        if getattr(config, name) != default:
            raise UserError(
                f"objective.terms replaces objective.{name}, which is {getattr(config, name)!r}: say it in a term "
                f"instead, or take terms away."
            )
    found: list[TermConfig | FeatureConfig] = []
    for i, term in enumerate(config.terms):
        where = f"objective.terms[{i}]"
        if not isinstance(term, Mapping):
            raise UserError(f"{where} is {term!r}; expected a mapping such as {{divergence: forward_kl, weight: 0.9}}.")
        if "feature" in term and "divergence" not in term:
            found.append(read_feature(term, where))
            continue
        check_names(term, [f.name for f in fields(TermConfig)], where, "setting")
        if missing := [f.name for f in fields(TermConfig) if f.default is MISSING and f.name not in term]:
            raise UserError(f"{where} has no {missing[0]}: {dict(term)!r}.")
        if not isinstance(square := term.get("scale_by_temperature_squared", True), bool):
            raise UserError(f"{where}.scale_by_temperature_squared is {square!r}; expected true or false.")
        found.append(TermConfig(**term))
    return found


def read_divergence(value: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    """See `read_named`."""
    return read_named(value, where, "forward_kl", "{skew_kl: {skew: 0.1}}", "my_module:MyDivergence")


def read_support(value: Any) -> SupportConfig:
    """What ``objective.support`` says."""
    if value == "full":
        return SupportConfig("full")
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "topk":
            return SupportConfig("topk", read_count(inner, "objective.support.topk"))
        if kind == "sampled" and not isinstance(inner, Mapping):
            return SupportConfig("sampled", read_count(inner, "objective.support.sampled"))
        if kind == "sampled":
            where = "objective.support.sampled"
            check_names(inner, ["draws", "teacher_fraction"], where, "setting")
            draws = read_count(inner.get("draws"), f"{where}.draws")
            if "teacher_fraction" not in inner:
                return SupportConfig("sampled", draws)
            fraction = read_plain(inner["teacher_fraction"], f"{where}.teacher_fraction", 0, 1, above=True)
            return SupportConfig("sampled", draws, fraction)
    raise UserError(f"objective.support is {shown(value)}; expected full, {{topk: 64}} or {{sampled: 32}}.")
