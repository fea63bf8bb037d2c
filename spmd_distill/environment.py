"""What a run ran on: versions, the platform, the devices, the commit of the working folder."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

__all__ = ["environment", "versions"]

_DISTRIBUTIONS = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "flax": "flax",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "spmd_distill": "spmd_distill",
}


def environment() -> dict[str, Any]:
    """What a run ran on: versions, the platform, and the devices.

    Returns:
        ``jax jaxlib flax optax orbax spmd_distill python`` -> version, ``platform`` (system and processor),
        ``backend``, ``processes``, ``devices`` (how many, over all processes), ``device_kind`` and
        ``device_list`` (names of the devices, in JAX's order), ``command`` (the command line), and ``git`` (commit and
        whether files differ from it, of the working folder; null where it is in no checkout).
    """
    devices = jax.devices()
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git": _git(),
        **versions(),
        "platform": platform.platform(),
        "backend": jax.default_backend(),
        "processes": jax.process_count(),
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
        "device_list": [str(device) for device in devices],
    }


def versions() -> dict[str, str]:
    """The versions that numbers may depend on: ``jax jaxlib flax optax orbax spmd_distill python``."""
    found = {name: _version(distribution) for name, distribution in _DISTRIBUTIONS.items()}
    return found | {"python": platform.python_version()}


def _git() -> dict[str, Any] | None:
    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "changed": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # a source checkout
