"""From the run file's objective to the `Objective` that is compiled, and back to words for people."""

import dataclasses
from typing import Any

import numpy as np

from spmd_distill.classes import Kind, Say, build_class, moving
from spmd_distill.config.numbers import read_number
from spmd_distill.config.objective import ObjectiveConfig, read_divergence, read_support, read_terms
from spmd_distill.divergences import DIVERGENCES, AbstractDivergence, AbstractLabelLoss, CrossEntropy, scheduled
from spmd_distill.errors import UserError
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
        terms = []
        for i, term in enumerate(read_terms(config)):
            where = f"objective.terms[{i}]"
            terms.append(
                WeightedTerm(
                    build_divergence(term.divergence, f"{where}.divergence", say),
                    moving(read_number(term.weight, f"{where}.weight")),
                    moving(read_number(term.temperature, f"{where}.temperature")),
                    term.scale_by_temperature_squared,
                )
            )
        objective = Objective(tuple(terms), support, vocab_size)
    if taken := RESERVED & set(objective.labels):
        name = min(taken)
        raise UserError(
            f"A divergence of the objective is called {name!r}, as a metric of every run is: give its class another "
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


def shared_vocabulary(wanted: int | None, tokenizer: int, teacher: int, student: int) -> int:
    """How many tokens count: as ``wanted``, or those of the tokenizer, or those that both models have."""
    least = min(teacher, student)
    if wanted is not None and wanted > least:
        raise UserError(
            f"objective.vocab_size is {wanted}, but the teacher has {teacher} tokens and the student {student}; "
            f"expected at most {least}, or null for the {min(tokenizer, least)} of tokenizer and models."
        )
    return min(tokenizer, least) if wanted is None else wanted


def describe(objective: Objective) -> str:
    """The objective in one line: every term with its weight, and the support if it is not the whole vocabulary."""
    support = objective.support
    over = ""
    if isinstance(support, TopK):
        over = f", over the teacher's {support.k} likeliest tokens and the rest as one"
    elif isinstance(support, Sampled):
        share = f"{support.teacher_fraction:.0%} by the teacher"
        over = f", over {support.draws} sampled tokens ({share})"
    return " + ".join(describe_terms(objective)) + over


def describe_terms(objective: Objective) -> list[str]:
    """Every term as ``0.9 T^2 x forward_kl at T = 2``."""
    found = []
    for term in objective.terms:
        if isinstance(term, FeatureTerm):
            found.append(f"{_said(term.weight)} x {term.name}")
            continue
        cold = not callable(term.temperature) and term.temperature == 1
        square = " T^2" if term.squared and not cold else ""
        at = "" if cold or isinstance(term.divergence, AbstractLabelLoss) else f" at T = {_said(term.temperature)}"
        found.append(f"{_said(term.weight)}{square} x {_called(term.divergence)}{at}")
    return found


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
    said = [f"{k} {_said(v) if callable(v) or isinstance(v, int | float) else v}" for k, v in values.items()]
    return divergence.name + (f"({', '.join(said)})" if said else "")
