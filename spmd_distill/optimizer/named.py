"""Optimizers by name: those of optax and optax.contrib, and anybody's by their import path."""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import optax

from spmd_distill.errors import UserError

Factory = Callable[..., Any]

REFUSED = {
    "lbfgs": "evaluates the loss several times a step",
    "optimistic_adam": "is old; its successor is optimistic_adam_v2",
    "rprop": "takes no learning rate that moves",
    "sm3": "takes no learning rate that moves",
    "sophia": "needs second derivatives",
    "dpsgd": "needs a gradient of every single row",
}
"""Optimizers that need more than a gradient."""

MASKS = ("mask", "weight_decay_mask")
"""What optimizers call the argument that says which parameters are decayed."""


def optimizer_names() -> list[str]:
    """Every optimizer that a run file can name."""
    return sorted(name for name in {*vars(optax.contrib), *vars(optax)} if _is_optimizer(name))


def find_optimizer(name: str) -> Factory:
    """The function called ``name`` in optax or optax.contrib, or ``module:function``.

    Raises `UserError` for an unknown name (with the nearest), one that cannot work here, and a path without a function.
    """
    if ":" in name:
        return _imported(name)
    if name in REFUSED:
        raise UserError(f"optimizer.name is {name!r}, which {REFUSED[name]}; expected another.")
    if not _is_optimizer(name):
        near = difflib.get_close_matches(name, optimizer_names(), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"optimizer.name is {name!r}, which is unknown.{hint} Known are {', '.join(optimizer_names())}; a function "
            f"of your own is given as my_module:factory."
        )
    return vars(optax).get(name) or vars(optax.contrib)[name]


def accepted(factory: Factory) -> Sequence[str] | None:
    """The names of a factory's arguments; None where it takes any."""
    parameters = inspect.signature(factory).parameters.values()
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else [p.name for p in parameters]


def make(factory: Factory, name: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call ``factory(**arguments, **options)``.

    Raises `UserError` for an option that it does not take (with the nearest that it does), one that has its own place
    in the run file, and for whatever it refuses.
    """
    known = accepted(factory)
    for option in options:
        if option in arguments or option == "learning_rate":
            raise UserError(
                f"optimizer.options.{option}: {name} gets it from another setting of optimizer; leave it out."
            )
        if known is not None and option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(known)}."
            raise UserError(f"optimizer.options.{option}: {name} has no such argument. {hint}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    try:
        tx = factory(**arguments, **values)
    except UserError:
        raise
    except Exception as error:  # whatever the factory raises for its arguments
        raise UserError(f"optimizer {name}: {type(error).__name__}: {error}") from error
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise UserError(
            f"optimizer.name is {name!r}, which returns a {type(tx).__name__}; expected an optax transformation."
        )
    return tx


def _is_optimizer(name: str) -> bool:
    """Whether optax has such a function, and it starts with a learning rate as its optimizers do."""
    found = vars(optax).get(name) or vars(optax.contrib).get(name)  # not getattr: old names warn
    if name.startswith(("_", "scale_by_")) or name in REFUSED or not isinstance(found, FunctionType | partial):
        return False
    returned = str(inspect.signature(found).return_annotation)
    return (
        "GradientTransformation" in returned and next(iter(inspect.signature(found).parameters), "") == "learning_rate"
    )


def _imported(path: str) -> Factory:
    """A function by ``module:function``; modules are looked for in the current folder, then where Python looks."""
    module, _, name = path.partition(":")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise UserError(
            f"optimizer.name is {path!r}, but there is no module {error.name!r} in the current folder nor on Python's "
            f"path."
        ) from error
    except Exception as error:  # whatever the user's own code raises
        raise UserError(f"optimizer.name is {path!r}; importing it raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    if not callable(found):
        raise UserError(f"optimizer.name is {path!r}, which has no function of that name.")
    return found
