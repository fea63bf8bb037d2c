"""The devices that jax finds, and what in the environment would surprise."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmd_distill.doctor.finding import Finding, size
from spmd_distill.doctor.probe import MARK

TIMEOUT = 120
"""Seconds that jax may take to find its devices."""
_ON = ("1", "true", "True", "yes", "on")
_FLAG = "--xla_force_host_platform_device_count"
_ACCELERATORS = (("/dev/nvidia0", "an NVIDIA GPU", "jax[cuda13]"), ("/dev/accel0", "a TPU", "jax[tpu]"))


def check_devices(environ: Mapping[str, str] = os.environ, timeout: float = TIMEOUT) -> Iterator[Finding]:
    """Ask a process of its own what jax sees in this environment, and which layouts fit."""
    found = probe(environ, timeout)
    if isinstance(found, str):
        fix = "Run python -c 'import jax; jax.devices()' to see all of it; JAX_PLATFORMS=cpu goes without."
        yield Finding("problem", "devices", f"jax finds none: {found}.", fix)
        return
    memory = f", {size(found['memory'])} each" if found["memory"] else ""
    pretended = " (simulated on the CPU)" if found["backend"] == "cpu" and found["devices"] > 1 else ""
    yield Finding("ok", "devices", f"{found['devices']} x {found['kind']}{memory}{pretended}.")
    if found["layouts"]:
        yield Finding("ok", "layouts", f"fit {found['devices']} devices: {', '.join(found['layouts'])}.")
    else:
        fix = "Write a layout of your own, see docs/sharding.md."
        yield Finding("problem", "layouts", f"none fits {found['devices']} devices.", fix)
    if found["backend"] == "cpu":
        for device, what, package in _ACCELERATORS:
            if Path(device).exists():
                fix = f"pip install '{package}', and unset JAX_PLATFORMS."
                yield Finding("problem", "devices", f"{device} is {what}, and jax does not use it.", fix)


def probe(environ: Mapping[str, str], timeout: float) -> dict[str, Any] | str:
    """What `spmd_distill.doctor.probe` prints, or why it did not."""
    command = [sys.executable, "-m", "spmd_distill.doctor.probe"]
    quiet = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    try:
        done = subprocess.run(
            command, env={**environ, **quiet}, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {timeout:.0f} s, as where another process holds the device"
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1].removeprefix(MARK))
    if done.returncode < 0:
        return f"its process was killed by signal {-done.returncode}"
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return said[-1].strip().rstrip(".") if said else f"its process ended with code {done.returncode}"


def check_environment(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Look for variables that change what a run does, or how fast."""
    flags = environ.get("XLA_FLAGS", "").split()
    wanted = next((flag.partition("=")[2] for flag in flags if flag.partition("=")[0] == _FLAG), "")
    threads = environ.get("NPROC", "")
    if wanted and not (wanted.isdecimal() and int(wanted) > 0):
        yield Finding("problem", "XLA_FLAGS", f"{_FLAG} is {wanted!r}; expected a number.", "Unset XLA_FLAGS.")
    elif wanted:
        yield Finding("note", "XLA_FLAGS", f"has {wanted} devices simulated, whatever a layout asks for.", "")
    devices = int(wanted) if wanted.isdecimal() else 8
    if threads and not (threads.isdecimal() and int(threads) >= devices):
        found = f"is {threads!r}, with {devices} simulated devices: a collective may wait for a thread for ever."
        yield Finding("problem", "NPROC", found, f"Unset it, or set it to {4 * devices} or more.")
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms:
        yield Finding("note", "JAX_PLATFORMS", f"holds jax to {platforms}.", "Unset it to use what there is.")
    for name, (found, fix) in _TRAPS.items():
        if environ.get(name, "") in _ON:
            yield Finding("note", name, found, fix)
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Finding("note", "CUDA_VISIBLE_DEVICES", "hides every GPU.", "Unset it to use them.")


_TRAPS = {
    "JAX_ENABLE_X64": (
        "float64 is on: what nobody gave a type takes twice the memory, and a TPU has none.",
        "Unset it; a run file turns it on with precision.",
    ),
    "JAX_DISABLE_JIT": ("nothing is compiled: a run is hundreds of times slower.", "Unset it."),
    "JAX_DEBUG_NANS": ("a NaN ends the run with a traceback before a guard sees it.", "Unset it."),
}
