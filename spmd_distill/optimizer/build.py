"""From the run file to an optimizer and what happens around it."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd_distill.config import OptimizerConfig, PrecisionConfig
from spmd_distill.errors import UserError
from spmd_distill.models.base import path_name
from spmd_distill.optimizer.moments import MOMENTS, held_in
from spmd_distill.optimizer.named import MASKS, accepted, find_optimizer, make
from spmd_distill.optimizer.paths import UNDECAYED, check_patterns, decayed, matches, only
from spmd_distill.optimizer.rule import UpdateRule
from spmd_distill.optimizer.scaling import LossScale

OURS = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
"""AdamW's constants here, where optax has others."""

DECAY = 0.01

CALLED = {
    "muon": {"b1": "adam_b1", "b2": "adam_b2"},
    "adafactor": {"weight_decay": "weight_decay_rate"},
}
"""Settings that an optimizer has under another name."""


def build_rule(config: OptimizerConfig, precision: PrecisionConfig, schedule: optax.Schedule, model: Any) -> UpdateRule:
    """What the run file asks for, for the parameters of ``model``: a `Model`, or all that is trained beside it.

    Raises `UserError` for an unknown optimizer, option or parameter, and for settings that exclude each other.
    """
    check_patterns(model.abstract, config.freeze, "optimizer.freeze")
    frozen = matches(model.abstract, config.freeze)
    if all(jax.tree.leaves(frozen)):
        raise UserError("optimizer.freeze leaves nothing to train; name fewer parameters.")
    scale = None
    if precision.loss_scale is not None:
        fixed = precision.scale
        scale = LossScale(window=precision.loss_scale_window) if fixed is None else LossScale(fixed, None)
    tx = build_optimizer(config, schedule, model)
    trained = jax.tree.map(lambda x: not x, frozen) if config.freeze else None
    rule = UpdateRule(tx, trained, scale, None, config.shard_state, config.offload)
    state = _tried(rule, config.name, model)
    if config.ema is not None and rule.averages(state):
        raise UserError(
            f"optimizer.ema is {config.ema}, but {config.name} averages the parameters itself; leave it out."
        )
    return replace(rule, ema=config.ema)


def _tried(rule: UpdateRule, name: str, model: Any) -> Any:
    """The abstract state after an abstract step. Raises `UserError` where the optimizer cannot make one."""

    def step(params: Any) -> Any:
        grads = jax.tree.map(jnp.zeros_like, only(rule.trained, params))
        return rule.apply(rule.start(params, 0), grads, jnp.bool_(True), jnp.float32(0))

    try:
        return jax.eval_shape(step, model.abstract)
    except Exception as error:  # whatever the optimizer raises
        raise UserError(
            f"optimizer.name is {name!r}, which cannot update this student: {type(error).__name__}: {error}"
        ) from error


def build_optimizer(config: OptimizerConfig, schedule: optax.Schedule, model: Any) -> optax.GradientTransformation:
    """The optimizer that the run file names, behind a clip of the global gradient norm, its moments in few bits."""
    if config.state != "float32" and config.name not in MOMENTS:
        raise UserError(
            f"optimizer.state is {config.state}, but the state of {config.name} is not known to be moving averages "
            f"that may be rounded; expected float32, or one of {', '.join(MOMENTS)}."
        )
    check_patterns(model.abstract, [p for p in config.no_decay if p not in UNDECAYED], "optimizer.no_decay")
    factory = find_optimizer(config.name)
    tx = make(factory, config.name, _arguments(config, factory, schedule, model), config.options)
    if config.clip_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(config.clip_norm), tx)
    return held_in(tx, config.state)


def _arguments(config: OptimizerConfig, factory: Any, schedule: optax.Schedule, model: Any) -> dict[str, Any]:
    """The settings that an optimizer takes, by its own names for them."""
    known, called = accepted(factory), CALLED.get(config.name, {})
    takes = lambda name: known is None or name in known  # noqa: E731
    found: dict[str, Any] = {"learning_rate": schedule} if takes("learning_rate") else {}
    for setting in ("b1", "b2", "eps", "weight_decay"):
        value, name = getattr(config, setting), called.get(setting, setting)
        if value is None and config.name == "adamw":
            value = OURS.get(setting)
        if value is None and setting == "weight_decay" and known is not None and any(m in known for m in MASKS):
            value = DECAY if name in known and name not in config.options else None
        if value is None:
            continue
        if not takes(name):
            raise UserError(
                f"optimizer.{setting} is {value}, but {config.name} has none; leave it out. It takes "
                f"{', '.join(known or ())}."
            )
        found[name] = value
    mask = next((m for m in MASKS if known is not None and m in known and m not in config.options), None)
    if mask is not None:
        found[mask] = lambda params: decayed(params, config.no_decay)
    if config.name == "muon" and "muon_weight_dimension_numbers" not in config.options:
        found["muon_weight_dimension_numbers"] = matrices(model)
    return found


def matrices(model: Any) -> Any:
    """For Muon: which parameters are matrices, and between which of their dimensions.

    The layers of a stack are matrices of their own. What has no ``embed`` dimension (biases, scales of heads) and what
    has a vocabulary (embedding and unembedding) is left to Adam. Where heads stand beside ``embed``, all of them make
    one matrix with it.
    """
    found = {}
    axes_of = jax.tree.leaves(model.axes, is_leaf=lambda x: isinstance(x, tuple))
    for (path, x), axes in zip(jax.tree_util.tree_leaves_with_path(model.abstract), axes_of, strict=True):
        inner = [i for i in range(x.ndim) if axes[i] != "layers"]
        if "embed" in axes and "vocab" not in axes and len(inner) > 1:
            embed = axes.index("embed")
            others = tuple(i for i in inner if i != embed)
            into = embed == inner[0]
            ends = ((embed,), others) if into else (others, (embed,))
            found[path_name(path)] = optax.contrib.MuonDimensionNumbers(*ends)

    def dimensions(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: found.get(path_name(path)), params)

    return dimensions
