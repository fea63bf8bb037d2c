"""The settings of a run: whether they read back, and whether they are those of its checkpoints."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmd_distill.config import RunConfig, parse_config
from spmd_distill.config.objective import read_terms
from spmd_distill.config.objective_features import FeatureConfig, read_features, read_layers
from spmd_distill.doctor.finding import Finding
from spmd_distill.environment import versions
from spmd_distill.errors import UserError
from spmd_distill.resuming import changes
from spmd_distill.runfolder import RunFolder
from spmd_distill.sharding import MeshLayout


def read_settings(folder: RunFolder) -> tuple[RunConfig | None, Finding]:
    """The run file of a run, and what is to be said of it."""
    name = folder.config.name
    if not folder.config.exists():
        fix = "Bring it back from a copy: a checkpoint's meta/metadata holds the same settings. Or check the path."
        return None, Finding("problem", name, "is missing, so this is no run to go on with.", fix, blocks=True)
    try:
        return parse_config(path=folder.config), Finding("ok", name, "reads back.")
    except UserError as error:
        then = written_by(folder.path).get("spmd_distill")
        another = then not in (None, versions()["spmd_distill"])
        fix = f"The run was written by spmd_distill {then}: install that, or mend the line." if another else ""
        return None, Finding("problem", name, str(error), fix or "Mend the line.", blocks=True)


def check_settings(config: RunConfig, folder: Path, step: int | None, meta: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the layout, the settings against those that the newest good ``step`` was trained with, and versions.

    ``meta`` is what was saved with that step; empty where there is none.
    """
    if config.mesh != "auto":
        try:
            MeshLayout.load(config.mesh)
        except UserError as error:
            yield Finding("problem", "mesh", str(error), "Bring it back, or resume with --mesh OTHER.", blocks=True)
    saved = meta.get("settings")
    for change in changes(saved, config) if isinstance(saved, dict) else []:
        if change.name == "run":
            continue  # the folder was moved
        another = change.effect == "another"
        effect = {"another": ": another training.", "rounding": ": the same to rounding."}.get(change.effect, ".")
        yield Finding(
            "problem" if another else "note",
            f"config.yaml, {change.name}",
            f"is not what step {step} was trained with ({change}){effect}",
            "Set it back, or resume with --allow-changes." if another else "",
            blocks=another,
        )
    if step is not None:
        yield from _layers(config, folder)
    yield from _versions(folder)


def _layers(config: RunConfig, folder: Path) -> Iterator[Finding]:
    """Whether the layers that a run found for its losses inside the network can be read back."""
    asked = [*read_features(config.objective.features), *read_terms(config.objective)]
    entries = [entry for entry in asked if isinstance(entry, FeatureConfig)]
    if not any(read_layers(entry.layers, "layers").kind == "best" for entry in entries):
        return
    fix = "Bring it back from a copy, or give pairs of layers in the place of best and resume with --allow-changes."
    try:
        json.loads((folder / "layers.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield Finding("problem", "layers.json", "is missing: it says which layers are compared.", fix, blocks=True)
    except (OSError, ValueError) as error:
        yield Finding("problem", "layers.json", f"cannot be read: {error}.", fix, blocks=True)


def written_by(folder: Path) -> dict[str, str]:
    """Versions of the packages that a run used last; nothing where that cannot be read."""
    found: dict[str, str] = {}
    try:
        found |= json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _versions(folder: Path) -> Iterator[Finding]:
    then, now = written_by(folder), versions()
    other = [f"{name} {then[name]} -> {now[name]}" for name in now if then.get(name, now[name]) != now[name]]
    if other:
        found = f"other versions than the run's: {', '.join(other)}."
        yield Finding("note", "versions", found, "Bit for bit as before only with the same versions.")
