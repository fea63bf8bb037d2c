"""Room: memory of this machine, and disk where the library writes."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from spmd_distill.doctor.finding import Finding, size

GIB = 2**30
DEMO_MEMORY, CACHE, RUNS = 6 * GIB, GIB // 2, 5 * GIB
"""What the demo takes: of memory, of disk for what it fetches, and for its run."""


def check_memory(available: int | None = None) -> Iterator[Finding]:
    """Check the memory that is free, or ``available`` bytes of it."""
    free = memory() if available is None else available
    if free is None:
        yield Finding("note", "memory", "this system does not say how much is free.")
    elif free < DEMO_MEMORY:
        fix = "Close something, or take smaller models: fewer data.rows, a shorter data.length."
        yield Finding("note", "memory", f"{size(free)} free; the demo takes {size(DEMO_MEMORY)}.", fix)
    else:
        yield Finding("ok", "memory", f"{size(free)} free.")


def memory() -> int | None:
    """Bytes of memory that this process may still take; None where that cannot be told."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, IndexError):
        pass  # another system, or a group without a limit ("max")
    return min(found, default=None)


def check_disk(about: str, folder: Path, wanted: int, setting: str) -> Iterator[Finding]:
    """Check that ``folder``, or where it would be made, can be written and has ``wanted`` bytes free."""
    there = next((above for above in (folder, *folder.absolute().parents) if above.exists()), Path("/"))
    if not there.is_dir():
        yield Finding("problem", about, f"{there} is a file; expected a folder.", setting)
        return
    if not os.access(there, os.W_OK | os.X_OK):
        yield Finding("problem", about, f"{there} cannot be written.", setting)
        return
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        yield Finding("problem", about, f"{there}: {error.strerror or error}.", setting)
        return
    found = f"{folder}: {size(free)} free"
    if free < wanted:
        yield Finding("problem", about, f"{found}; the demo takes {size(wanted)}.", f"Free some space. {setting}")
    else:
        yield Finding("ok", about, f"{found}.")
