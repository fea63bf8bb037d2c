"""Which settings may change between two sessions of a run, and which would make it another run."""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
from rich.markup import escape
from rich.table import Table

from spmd_distill.checkpoint import finished_steps, read_meta
from spmd_distill.config import RunConfig, to_dict
from spmd_distill.errors import UserError
from spmd_distill.optimizer import build_schedule
from spmd_distill.runfolder import RunFolder

EXACT = (
    "run", "logging.*", "eval.samples", "eval.samples_every",
    "eval.every", "eval.prompts", "eval.new_tokens", "checkpoint.*",
    "data.cache", "data.workers", "data.prefetch",
    "guards.clip", "guards.teacher", "guards.memory", "guards.device_memory_gib",
    "guards.out_of_memory", "guards.communication", "guards.utilisation", "guards.profile_steps",
)  # fmt: skip
"""Settings that may change freely: no bit of the training depends on them."""
BY_CONTENT = ("teacher.path", "data.train", "data.heldout")
"""Paths that may change freely: what lies there is compared by its fingerprint."""
ROUNDING = (
    "mesh", "mapper", "head.kind", "head.chunk", "head.memory_budget_mib",
    "teacher.attention", "student.attention", "student.remat",
)  # fmt: skip
"""Settings that may change, and then the run goes on to rounding, not bit for bit."""

TOGETHER = ("data.rows", "data.micro_batches")
"""Settings of which only the product matters: as long as that stays, the run goes on to rounding."""

_EFFECTS = {
    "exact": "none on the training",
    "content": "none, as long as the content is the same",
    "rounding": "to rounding",
    "another": "another training",
}
_ABSENT = object()


class Change(NamedTuple):
    """A setting that is not what it was."""

    name: str
    old: Any
    new: Any
    effect: str
    """``exact``, ``content``, ``rounding``, or ``another``, which is refused unless it is allowed."""

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.old)} -> {_shown(self.new)}"


def saved_settings(folder: RunFolder) -> dict[str, Any]:
    """The settings that a run was trained with last: those of its newest checkpoint, else its ``config.yaml``.

    Raises `UserError` where neither can be read.
    """
    for step in reversed(finished_steps(folder.checkpoints)):
        found = (read_meta(folder.checkpoints, step) or {}).get("settings")
        if isinstance(found, dict):
            return found
    return folder.read_config()


def changes(old: Mapping[str, Any], config: RunConfig) -> list[Change]:
    """The settings of ``config`` that differ from the saved ones, in the order of the run file.

    A setting that did not exist when the run began counts as its default.
    """
    before, after, default = _flat(old), _flat(to_dict(config)), _flat(to_dict(RunConfig()))
    found = []
    for name, new in after.items():
        if (was := before.get(name, default.get(name, _ABSENT))) != new:
            found.append(Change(name, None if was is _ABSENT else was, new, _effect(name, was, config)))
    if _product(before, default) == _product(after, default):
        found = [change._replace(effect="rounding") if change.name in TOGETHER else change for change in found]
    gone = [name for name in before if name not in after and before[name] != default.get(name, before[name])]
    return found + [Change(name, before[name], default[name], _effect(name, before[name], config)) for name in gone]


def check_changes(found: Sequence[Change], allowed: bool, folder: RunFolder) -> None:
    """Raise `UserError` naming the changes that would make it another training, unless they are allowed."""
    refused = [change for change in found if change.effect == "another"]
    if refused and not allowed:
        raise UserError(
            f"The run in {folder.path} was trained with other settings: {'; '.join(map(str, refused))}. Set them back, "
            f"start a new run, or accept them from here on with --allow-changes."
        )


def changes_table(found: Sequence[Change]) -> Table:
    """The changes, setting by setting."""
    table = Table(title="Settings that differ from the run's", title_justify="left")
    for name in ("setting", "was", "is", "effect"):
        table.add_column(name, overflow="fold")
    for change in found:
        shown = [change.name, _shown(change.old), _shown(change.new), _EFFECTS[change.effect]]
        table.add_row(*map(escape, shown))
    return table


def _effect(name: str, was: Any, config: RunConfig) -> str:
    for effect, names in (("exact", EXACT), ("content", BY_CONTENT), ("rounding", ROUNDING)):
        if any(fnmatchcase(name, pattern) for pattern in names):
            return effect
    if name == "steps" and isinstance(was, int) and _same_rates(was, config):
        return "exact"
    return "another"


def _same_rates(steps: int, config: RunConfig) -> bool:
    """Whether the learning rate of the steps that both lengths of the run have is the same."""
    at = np.unique(np.linspace(0, min(steps, config.steps) - 1, 64).astype(int))
    one, other = build_schedule(config.optimizer, steps), build_schedule(config.optimizer, config.steps)
    return all(float(np.asarray(one(int(k)))) == float(np.asarray(other(int(k)))) for k in at)


def _product(settings: Mapping[str, Any], default: Mapping[str, Any]) -> Any:
    numbers = [settings.get(name, default[name]) for name in TOGETHER]
    return math.prod(numbers) if all(isinstance(n, int) for n in numbers) else None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and value
        found |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
