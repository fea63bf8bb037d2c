"""What must be in the environment before jax starts, set for the user. This module does not import jax."""

import math
import os
from importlib import resources
from pathlib import Path

import yaml

SIMULATED_DEVICES, MOST_SIMULATED_DEVICES = 8, 16
"""Devices a CPU pretends to have if no layout asks for more, and the most that one gets."""

FAST_COMPILE = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
"""For many small programs that run a few times each: the same numbers, compiled in a third of the time."""


def prepare_jax(devices: int = SIMULATED_DEVICES, *, fast_compile: bool = False) -> None:
    """Set XLA_FLAGS and NPROC for a process that has not used jax yet; what the user has set stays.

    ``devices`` CPU devices are simulated (accelerators are not touched by it). NPROC widens XLA's CPU thread pool:
    with fewer threads than devices a collective can wait for a device that never gets a thread. ``fast_compile`` is
    for checking numbers, not for training.
    """
    flags = [f"--xla_force_host_platform_device_count={devices}", *(FAST_COMPILE if fast_compile else ())]
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in flags if flag.split("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
    os.environ.setdefault("NPROC", str(max(32, 4 * devices)))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def devices_of(layout: str) -> int:
    """How many devices a layout file asks for, by name or path; `SIMULATED_DEVICES` where that cannot be told yet."""
    path = Path(layout)
    if path.suffix not in (".yaml", ".yml"):
        path = layouts_folder() / f"{layout}.yaml"
    try:
        sizes = [int(n) for n in yaml.safe_load(path.read_text())["axes"].values()]
    except (OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError):
        return SIMULATED_DEVICES  # whatever is wrong with it, reading the layout in earnest will say so
    count = math.prod(sizes)
    # A pod's layout is for a pod: more devices than this on one CPU would only wait for each other.
    return count if SIMULATED_DEVICES < count <= MOST_SIMULATED_DEVICES else SIMULATED_DEVICES


def layouts_folder() -> Path:
    """Where the built-in layouts lie."""
    return _shipped("meshes", "meshes")


def run_files_folder() -> Path:
    """Where the run files lie that ``spmd-distill init`` starts from."""
    return _shipped("run_files", "docs/run-files")


def _shipped(name: str, source: str) -> Path:
    """A folder of files that come with the library: in a wheel inside the package, in a checkout beside it."""
    installed = Path(str(resources.files("spmd_distill"))) / name
    return installed if installed.is_dir() else Path(__file__).resolve().parent.parent / source
