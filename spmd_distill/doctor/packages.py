"""The packages that the library stands on, against what it asks for, and those that would give more."""

import importlib.metadata
import importlib.util
import platform
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from spmd_distill.doctor.finding import Finding

NAME = "spmd_distill"
OPTIONAL = {
    "pyarrow": ("parquet", "Parquet files as data"),
    "datasets": ("datasets", "folders of save_to_disk and hf:// as data"),
    "huggingface_hub": ("hub", "models fetched from the Hugging Face hub"),
    "wandb": ("", "runs watched on Weights & Biases"),
    "tensorboard": ("", "the events of a run shown: tensorboard --logdir runs"),
}
"""Package -> the extra that brings it ("" where none does), and what it gives. torch is not needed for anything."""


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    """Check the version of Python."""
    shown = ".".join(map(str, version))
    if version < (3, 11):
        yield Finding("problem", "Python", f"{shown}; expected 3.11 or later.", "Use a later one.")
    else:
        yield Finding("ok", "Python", f"{shown} ({platform.python_implementation()}) at {sys.executable}.")


def check_packages(wanted: Sequence[str] | None = None) -> Iterator[Finding]:
    """Check installed versions against ``wanted``: requirements as in pyproject.toml; None takes the library's own."""
    good = []
    for text in requirements() if wanted is None else wanted:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            yield Finding("note", text, "is no requirement that can be read.")
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = installed(requirement.name)
        fix = f"pip install '{text}'"
        if version is None:
            yield Finding("problem", requirement.name, "is not installed.", fix)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield Finding("problem", requirement.name, f"is {version}; expected {requirement.specifier}.", fix)
        else:
            good.append(f"{requirement.name} {version}")
    yield from _pair()
    if good:
        yield Finding("ok", "packages", f"{', '.join(good)}.")


def _pair() -> Iterator[Finding]:
    """jax and jaxlib are released together, and jax refuses a jaxlib that is older than it knows."""
    jax, jaxlib = installed("jax"), installed("jaxlib")
    if jaxlib is None:
        yield Finding("problem", "jaxlib", "is not installed.", "pip install jax")
    elif jax is not None and jax != jaxlib:
        fix = f"pip install jax=={jax} jaxlib=={jax}"
        yield Finding("note", "jaxlib", f"is {jaxlib}, and jax is {jax}: they are released together.", fix)


def check_optional() -> Iterator[Finding]:
    """Say what packages that are not needed would give."""
    for name, (extra, gives) in OPTIONAL.items():
        version = installed(name)
        if version is not None:
            yield Finding("ok", name, f"{version}: {gives}.")
        else:
            fix = f"pip install '{NAME}[{extra}]'" if extra else f"pip install {name}"
            yield Finding("note", name, f"is not installed; not needed. It gives: {gives}.", fix)


def installed(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> list[str]:
    """What the library asks for: as its checkout says, else as it was installed; nothing where neither is known."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    try:
        found = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        if found["name"] == NAME:
            return list(found["dependencies"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not a checkout
    try:
        listed = importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [text for text in listed if "extra ==" not in text]
