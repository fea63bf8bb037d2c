"""Other libraries to compare with, each in a virtual environment of its own that is made once and kept.

The environments lie in the user's cache folder, ``$XDG_CACHE_HOME`` or ``~/.cache``, under ``spmd_distill/peers``; a
folder's name holds a hash of what is installed in it, so that other requirements make another environment. Deleting a
folder is safe. Where an environment cannot be made (no network, no wheel for this Python), `environment` raises
`Unavailable` with the reason, and a benchmark leaves that library's rows out. This module does not import jax.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

COMPLETE = "complete"
"""The file whose presence says that an environment was made to the end."""

_SAID_EVERY = 20.0
"""Seconds between two signs of life of an installation."""


class Unavailable(Exception):
    """A library cannot be had here; the message says why, in one line."""


@dataclass(frozen=True)
class Peer:
    """A library to compare with: what to install for it, and what must then be importable."""

    name: str
    requirements: tuple[str, ...]
    imports: str

    @property
    def folder(self) -> Path:
        """Where its environment lies, for this version of Python."""
        version = ".".join(map(str, sys.version_info[:2]))
        digest = hashlib.sha256("\n".join((version, *self.requirements)).encode()).hexdigest()[:10]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "spmd_distill" / "peers" / f"{self.name}-{digest}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


TUNIX = Peer("tunix", ("google-tunix==0.1.7", "jax==0.10.2", "jaxlib==0.10.2"), "tunix.distillation")
TORCH = Peer("torch", ("torch==2.13.0", "numpy"), "torch")
LIGER = Peer("liger", ("torch==2.13.0", "numpy", "liger-kernel", "setuptools"), "torch, liger_kernel")


def environment(peer: Peer, timeout: float = 1800.0) -> Path:
    """The Python of a peer's environment; made first if it is not there. Raises `Unavailable`.

    An installation that failed is tried again at the next call: a network that was away may be back.
    """
    if (peer.folder / COMPLETE).exists():
        return peer.python
    shutil.rmtree(peer.folder, ignore_errors=True)  # one that was interrupted
    print(f"Installing {' '.join(peer.requirements)} into {peer.folder}, once.", file=sys.stderr, flush=True)
    log = peer.folder.with_suffix(".log")
    pip = [str(peer.python), "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "2"]
    commands = (
        [sys.executable, "-m", "venv", str(peer.folder)],
        [*pip, "install", "--quiet", *peer.requirements],
        [str(peer.python), "-c", f"import {peer.imports}"],
    )
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        for command in commands:
            _run(command, log, timeout)
        (peer.folder / COMPLETE).touch()
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(peer.folder, ignore_errors=True)
        raise Unavailable(f"{peer.name} could not be installed: {_reason(log, error)}") from error
    return peer.python


def _run(command: list[str], log: Path, timeout: float) -> None:
    """Run a command to its end, with its output in a file and a sign of life now and then."""
    began = said = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                now = time.monotonic()
                if now - began > timeout:
                    raise subprocess.TimeoutExpired(command, timeout)
                if now - said > _SAID_EVERY:
                    print(f"  still at it after {now - began:.0f} s", file=sys.stderr, flush=True)
                    said = now
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _reason(log: Path, error: Exception) -> str:
    """The line of the log that says most: pip's last error, or the last line there is."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no end after {error.timeout:.0f} s"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()] if log.exists() else []
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    told = [line for line in lines if line]
    return (errors or told or [str(error)])[-1]
