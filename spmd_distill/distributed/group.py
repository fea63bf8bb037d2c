"""How a process joins its group: from settings, the environment, or what JAX knows of the cluster."""

import contextlib
import hashlib
import importlib.metadata
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax

from spmd_distill.config import DistributedConfig
from spmd_distill.distributed.agree import check_same
from spmd_distill.distributed.rollcall import roll_call
from spmd_distill.errors import UserError

PREFIX = "SPMD_DISTILL_"
"""Before the upper-case name of a setting: its name in the environment."""
_ALSO = {"coordinator": "JAX_COORDINATOR_ADDRESS", "process_id": "JOB_COMPLETION_INDEX"}
"""Names that others have given: JAX's own, and that of Kubernetes' Indexed Jobs."""


def join(config: DistributedConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Come together with the other processes, before anything else of JAX is used. Alone, or once more: nothing.

    Afterwards, a signal means again what it means to Python: JAX's own notifier, which swallows SIGTERM, is left out.

    Raises:
        UserError: A setting is missing or wrong; JAX has been used already; process 0 cannot be reached, or not all
            came, within ``config.timeout`` seconds; the port is taken; another process has this one's number.
    """
    wanted = settings(config, environ)
    if jax.distributed.is_initialized() or (wanted.coordinator is None and not wanted.auto):
        return
    given = (wanted.coordinator, wanted.processes, wanted.process_id)
    if not wanted.auto:
        for name, value in zip(("processes", "process_id"), given[1:], strict=True):
            if value is None:
                raise UserError(
                    f"distributed.coordinator is {wanted.coordinator}, and distributed.{name} is not set. Set it, or "
                    f"{PREFIX}{name.upper()} in the environment, or distributed.auto for JAX to find out."
                )
    if wanted.coordinator is not None and wanted.processes is not None and wanted.process_id is not None:
        roll_call(wanted.coordinator, wanted.processes, wanted.process_id, wanted.timeout)
        if wanted.process_id > 0:
            _wait_for_jax(wanted.coordinator, wanted.timeout)
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            *given,
            cluster_detection_method=None if wanted.auto else "deactivate",
            initialization_timeout=wanted.timeout,
            heartbeat_timeout_seconds=wanted.heartbeat,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(_readable(str(error), wanted)) from error


def settings(config: DistributedConfig, environ: Mapping[str, str]) -> DistributedConfig:
    """The settings with those of the environment in their places. Raises `UserError` for a value of a wrong type."""
    found: dict[str, Any] = {}
    for field in fields(config):
        names = [PREFIX + field.name.upper(), *([_ALSO[field.name]] if field.name in _ALSO else [])]
        name = next((name for name in names if environ.get(name)), None)
        if name is None or (name == "JOB_COMPLETION_INDEX" and PREFIX + "COORDINATOR" not in environ):
            continue
        text = environ[name]
        if field.name == "coordinator":
            found[field.name] = text
        elif field.name == "auto":
            found[field.name] = text.lower() in ("1", "true", "yes")
        elif text.isdecimal():
            found[field.name] = int(text)
        else:
            raise UserError(f"{name} in the environment is {text!r}; expected a whole number.")
    result = replace(config, **found)
    result.check()
    return result


def check_devices(devices: Sequence[Any], name: str) -> None:
    """Hold the devices of a mesh called ``name`` against the group: every process has as many, and all are used.

    Raises `UserError` on every process.
    """
    if jax.process_count() == 1:
        return
    of_all = [device.process_index for device in jax.devices()]
    counts = [of_all.count(p) for p in range(jax.process_count())]
    if len(set(counts)) > 1:
        odd = next(p for p, n in enumerate(counts) if n != counts[0])
        raise UserError(
            f"Process {odd} has {counts[odd]} device(s), and process 0 has {counts[0]}; expected as many on each. Give "
            f"all hosts the same accelerators, or the same XLA_FLAGS."
        )
    if len(devices) != len(of_all):
        raise UserError(
            f"Mesh layout {name!r} is for {len(devices)} device(s), and the {len(counts)} processes have "
            f"{len(of_all)}, {counts[0]} each; expected it to use all of them. Take another layout (fsdp and dp fit "
            f"any number) or mapper, or start fewer processes."
        )


def check_alike(run_file: str) -> None:
    """Raise `UserError` on every process where they differ in run file, code, or the packages that compute."""
    if jax.process_count() == 1:
        return
    package = Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    check_same(
        {
            "run file": run_file,
            "version of spmd_distill": code.hexdigest(),
            "version of Python, JAX or its packages": packages + sys.version,
        },
        "Give all hosts the same.",
    )


def _wait_for_jax(coordinator: str, seconds: float) -> None:
    """Wait until process 0, which is there, has started JAX's service: else JAX would wait a second between tries."""
    host, _, port = coordinator.rpartition(":")
    until = time.monotonic() + min(seconds, 60)
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        time.sleep(0.05)


def _readable(message: str, wanted: DistributedConfig) -> str:
    """A sentence for what JAX says when a group does not come together."""
    first = message.strip().splitlines()[0]
    if "must be called before" in message:
        return "JAX has been used already, so this process cannot join a group any more. Join first, then make arrays."
    if wanted.auto and ("should be defined" in message or "must be defined" in message):
        return (
            f"distributed.auto: JAX detects no cluster here ({first}). It knows Slurm, TPU pods, Kubernetes (with the "
            f"package kubernetes) and Open MPI. Set distributed.coordinator, processes and process_id."
        )
    if "DEADLINE_EXCEEDED" in message or "imed out" in message:
        return (
            f"The processes did not come together within {wanted.timeout} s ({first}). Was each of the "
            f"{wanted.processes or 'group'} started, with a number of its own, and can it reach process 0?"
        )
    if "different incarnation" in message or "ALREADY_EXISTS" in message:
        return f"Another process has number {wanted.process_id} too. Give each its own distributed.process_id."
    return f"The group cannot be joined: {first}"
