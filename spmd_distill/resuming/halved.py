"""Micro-batches that were halved for want of memory: the next session of the run begins with them."""

import json
from dataclasses import replace

from spmd_distill.config import RunConfig
from spmd_distill.distributed import from_first
from spmd_distill.runfolder import RunFolder

FILE = "micro_batches.json"
"""``{"fits": [rows, micro_batches], "asked": [[rows, micro_batches], ...]}``: what fits in place of what was asked."""


def remember(folder: RunFolder, before: RunConfig, after: RunConfig) -> None:
    """Leave in the folder that the micro-batches of ``before`` do not fit and those of ``after`` are used instead.

    Raises `UserError` where that cannot be written.
    """
    asked = [pair for pair in _read(folder).get("asked", []) if pair != _pair(before)]
    folder.write_json(FILE, {"fits": _pair(after), "asked": [*asked, _pair(before)]})


def recall(folder: RunFolder, config: RunConfig) -> RunConfig:
    """The settings, with the micro-batches that fit where those asked for are known not to; alike on every process."""
    found = json.loads(from_first(json.dumps(_read(folder))))
    if config.guards.out_of_memory != "halve" or _pair(config) not in found.get("asked", []):
        return config
    rows, micro_batches = found["fits"]
    return replace(config, data=replace(config.data, rows=rows, micro_batches=micro_batches))


def _pair(config: RunConfig) -> list[int]:
    return [config.data.rows, config.data.micro_batches]


def _read(folder: RunFolder) -> dict[str, list]:
    try:
        found = json.loads((folder.path / FILE).read_text())
        (rows, micro_batches), asked = found["fits"], found["asked"]
        usable = all(a * b == rows * micro_batches and a > rows > 0 for a, b in asked)
    except (OSError, ValueError, TypeError, KeyError):
        return {}  # none was halved
    return found if usable else {}
