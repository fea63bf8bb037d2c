"""From the run file's objective to the `Objective` that is compiled, and back to words for people."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_distill.classes import Kind, Say, build_class, moving
from spmd_distill.config.numbers import read_number
from spmd_distill.config.objective import ObjectiveConfig, TermConfig, read_divergence, read_support, read_terms
from spmd_distill.config.objective_features import FeatureConfig, read_features, read_layers, read_loss
from spmd_distill.divergences import DIVERGENCES, AbstractDivergence, AbstractLabelLoss, CrossEntropy, scheduled
from spmd_distill.errors import UserError
from spmd_distill.features import (
    FEATURES,
    AbstractFeatureLoss,
    AbstractLayerMap,
    Compared,
    Explicit,
    Inside,
    Last,
    Pairs,
    Uniform,
)
from spmd_distill.head import AGREEMENT, FULL, Sampled, Support, TopK
from spmd_distill.objective import FeatureTerm, Objective, WeightedTerm

_RUN = """
    loss learning_rate grad_norm tokens tokens_per_second perplexity_student perplexity_teacher
    step split seconds nonfinite
"""
RESERVED = frozenset(AGREEMENT) | set(_RUN.split())
"""Names of metrics that no term may have."""

_DIVERGENCE = Kind(
    AbstractDivergence, DIVERGENCES, "divergence", "my_module:MyDivergence", "AbstractSeparable or AbstractRowwise"
)
_LOSS = Kind(AbstractFeatureLoss, FEATURES, "loss inside the network", "my_module:MyLoss", "AbstractFeatureLoss")


@dataclass(frozen=True)
class Unmatched(AbstractLayerMap):
    """Stands for ``best`` until a run has compared its models (`with_pairs`): as many pairs, those of `Uniform`."""

    count: int | None = None

    def pairs(self, student: int, teacher: int) -> Pairs:
        """See the class."""
        if self.count is not None and self.count > student:
            raise UserError(f"Layer map best: count is {self.count}; expected 1 to {student}, the student's layers.")
        return Uniform(self.count).pairs(student, teacher)


def build_objective(
    config: ObjectiveConfig, vocab_size: int | None = None, say: Say = lambda message: None
) -> Objective:
    """The objective that the run file asks for, over the first ``vocab_size`` tokens (None: all).

    Raises `UserError` for an unknown divergence or parameter, with the nearest known one, and for a value that the
    divergence's class refuses.
    """
    support = build_support(config)
    if config.terms is None:
        objective = Objective.mix(
            build_divergence(config.divergence, "objective.divergence", say),
            moving(read_number(config.alpha, "objective.alpha")),
            moving(read_number(config.temperature, "objective.temperature")),
            label_smoothing=moving(read_number(config.label_smoothing, "objective.label_smoothing")),
            z_loss=moving(read_number(config.z_loss, "objective.z_loss")),
            support=support,
            vocab_size=vocab_size,
        )
    else:
        named = [(f"objective.terms[{i}]", term) for i, term in enumerate(read_terms(config))]
        objective = Objective(tuple(_build_term(term, where, say) for where, term in named), support, vocab_size)
    more = enumerate(read_features(config.features))
    inside = tuple(build_feature(entry, f"objective.features[{i}]", say) for i, entry in more)
    objective = dataclasses.replace(objective, terms=objective.terms + inside)
    if taken := RESERVED & set(objective.labels):
        name = min(taken)
        raise UserError(
            f"A term of the objective is called {name!r}, as a metric of every run is: give its class another "
            f"name, or a property `name`."
        )
    return objective


def build_support(config: ObjectiveConfig) -> Support:
    """The support that the run file asks for."""
    found = read_support(config.support)
    if found.kind == "topk":
        return TopK(found.count)
    if found.kind == "sampled":
        fraction = {} if found.teacher_fraction is None else {"teacher_fraction": found.teacher_fraction}
        return Sampled(found.count, **fraction)
    return FULL


def build_divergence(value: Any, where: str, say: Say = lambda message: None) -> AbstractDivergence:
    """A divergence by name or import path, with its parameters; what it warns about is said."""
    name, parameters = read_divergence(value, where)
    return build_class(_DIVERGENCE, name, parameters, where, say)


def evenly_paired(count: int, student: int, teacher: int) -> Pairs:
    """At most ``count`` pairs of layers at equal distances, of models of so many layers."""
    return Uniform(min(count, student)).pairs(student, teacher)


def _build_term(term: TermConfig | FeatureConfig, where: str, say: Say) -> WeightedTerm | FeatureTerm:
    if isinstance(term, FeatureConfig):
        return build_feature(term, where, say)
    return WeightedTerm(
        build_divergence(term.divergence, f"{where}.divergence", say),
        moving(read_number(term.weight, f"{where}.weight")),
        moving(read_number(term.temperature, f"{where}.temperature")),
        term.scale_by_temperature_squared,
    )


def build_feature(config: FeatureConfig, where: str, say: Say = lambda message: None) -> FeatureTerm:
    """A term inside the network; where its layers are to be the ``best``, they are `Unmatched` as yet."""
    name, parameters = read_loss(config.feature, f"{where}.feature")
    loss = build_class(_LOSS, name, parameters, f"{where}.feature", say)
    asked = read_layers(config.layers, f"{where}.layers")
    if asked.kind == "pairs":
        layers: AbstractLayerMap = Explicit(asked.pairs)
    elif asked.kind == "last":
        layers = Last() if asked.count is None else Last(asked.count)
    else:
        layers = Uniform(asked.count) if asked.kind == "uniform" else Unmatched(asked.count)
    return FeatureTerm(loss, layers, moving(read_number(config.weight, f"{where}.weight")))


def unmatched(objective: Objective) -> dict[str, tuple[tuple[str, ...], int | None]]:
    """Of each term whose layers are to be found yet, by label: its tap points, and of how many layers."""
    found = {}
    for label, term in objective.features.items():
        if isinstance(term.layers, Unmatched) and not term.loss.at_end:
            found[label] = term.loss.taps, term.layers.count
    return found


def with_pairs(objective: Objective, pairs: Mapping[str, Pairs]) -> Objective:
    """The objective with these pairs of layers for the terms that are `Unmatched`, by label."""
    terms = [
        dataclasses.replace(term, layers=Explicit(pairs[label])) if label in pairs else term
        for label, term in zip(objective.labels, objective.terms, strict=True)
    ]
    return dataclasses.replace(objective, terms=tuple(terms))


def shared_vocabulary(wanted: int | None, tokenizer: int, teacher: int, student: int) -> int:
    """How many tokens count: as ``wanted``, or those of the tokenizer, or those that both models have."""
    least = min(teacher, student)
    if wanted is not None and wanted > least:
        raise UserError(
            f"objective.vocab_size is {wanted}, but the teacher has {teacher} tokens and the student {student}; "
            f"expected at most {least}, or null for the {min(tokenizer, least)} of tokenizer and models."
        )
    return min(tokenizer, least) if wanted is None else wanted


def describe(objective: Objective, inside: Inside | None = None) -> str:
    """The objective in one line: every term with its weight, and the support if it is not the whole vocabulary.

    ``inside`` is what its terms inside the network are for two models: it has the pairs of layers.
    """
    support = objective.support
    over = ""
    if isinstance(support, TopK):
        over = f", over the teacher's {support.k} likeliest tokens and the rest as one"
    elif isinstance(support, Sampled):
        share = f"{support.teacher_fraction:.0%} by the teacher"
        over = f", over {support.draws} sampled tokens ({share})"
    return " + ".join(describe_terms(objective, inside)) + over


def describe_terms(objective: Objective, inside: Inside | None = None) -> list[str]:
    """Every term as ``0.9 T^2 x forward_kl at T = 2``; one inside the network with its pairs of layers."""
    found = []
    compared = {} if inside is None else {c.label: c for c in inside.compared}
    for label, term in zip(objective.labels, objective.terms, strict=True):
        if isinstance(term, FeatureTerm):
            found.append(f"{_said(term.weight)} x {_called_inside(term.loss)}{_at_layers(compared.get(label))}")
            continue
        cold = not callable(term.temperature) and term.temperature == 1
        square = " T^2" if term.squared and not cold else ""
        at = "" if cold or isinstance(term.divergence, AbstractLabelLoss) else f" at T = {_said(term.temperature)}"
        found.append(f"{_said(term.weight)}{square} x {_called(term.divergence)}{at}")
    return found


def _called_inside(loss: AbstractFeatureLoss) -> str:
    """The loss' name with those of its parameters that are not the usual ones, and where it looks."""
    odd = {}
    for f in dataclasses.fields(loss) if dataclasses.is_dataclass(loss) else ():
        value = getattr(loss, f.name)
        if value != f.default and value not in loss.taps:
            odd[f.name] = value
    return f"{loss.name}{_listed(odd)} at {', '.join(loss.taps)}"


def _at_layers(compared: Compared | None) -> str:
    """``, layers 0-2 1-5``: of the student and of the teacher; of many, some."""
    if compared is None or compared.loss.at_end:
        return ""
    pairs = [f"{s}-{t}" for s, t in compared.pairs]
    if len(pairs) > 8:
        pairs = [*pairs[:3], "...", *pairs[-2:], f"({len(pairs)} pairs)"]
    return f", layers {' '.join(pairs)}"


def describe_vocabulary(objective: Objective, tokenizer: int, teacher: int, student: int) -> str:
    """How many tokens count, and the models' own numbers where these differ."""
    count = objective.vocab_size if objective.vocab_size is not None else min(teacher, student)
    if count == teacher == student:
        return f"vocabulary: {count} tokens"
    what = "tokens of the tokenizer" if count == tokenizer else "tokens"
    return f"vocabulary: {count} {what}; teacher has {teacher}, student {student} rows"


def moving_numbers(objective: Objective, step: int) -> dict[str, float]:
    """What the objective's schedules say at an optimizer step: ``forward_kl.weight``, ``skew_kl.skew`` and so on."""
    found: dict[str, Any] = {}
    for label, term in zip(objective.labels, objective.terms, strict=True):
        found[f"{label}.weight"] = term.weight
        if isinstance(term, FeatureTerm):
            continue
        found[f"{label}.temperature"] = term.temperature
        found |= {f"{label}.{name}": value for name, value in scheduled(term.divergence).items()}
    return {name: float(np.asarray(value(step))) for name, value in found.items() if callable(value)}


def _said(value: Any) -> str:
    if not callable(value):
        return f"{value:g}"
    return str(value) if type(value).__str__ is not object.__str__ else "(a schedule)"


def _called(divergence: AbstractDivergence) -> str:
    """The divergence's name with its parameters."""
    values = {} if not dataclasses.is_dataclass(divergence) else {
        f.name: getattr(divergence, f.name) for f in dataclasses.fields(divergence) if f.name != "name"
    }  # fmt: skip
    if isinstance(divergence, CrossEntropy) and divergence.label_smoothing == 0:
        values = {}
    return divergence.name + _listed(values)


def _listed(values: Mapping[str, Any]) -> str:
    said = [f"{k} {_said(v) if callable(v) or isinstance(v, int | float) else v}" for k, v in values.items()]
    return f"({', '.join(said)})" if said else ""
