"""All that can be said of a machine before a run; imports no jax, so that a broken one is a finding."""

from collections.abc import Callable, Iterator
from pathlib import Path

from spmd_distill.doctor.devices import check_devices, check_environment
from spmd_distill.doctor.finding import Finding
from spmd_distill.doctor.packages import check_optional, check_packages, check_python
from spmd_distill.doctor.space import CACHE, RUNS, check_disk, check_memory


def check_machine(say: Callable[[str], None] = lambda message: None) -> list[Finding]:
    """Check Python, packages, devices, room and environment. ``say`` is told what takes long."""
    from spmd_distill.assets import default_cache

    def findings() -> Iterator[Finding]:
        yield from check_python()
        yield from check_packages()
        yield from check_environment()
        say("asking jax for its devices")
        yield from check_devices()
        yield from check_memory()
        yield from check_disk("cache", default_cache(), CACHE, "Set SPMD_DISTILL_CACHE to another folder.")
        yield from check_disk("runs", Path("runs"), RUNS, "Give runs another folder with --run.")
        yield from check_optional()

    return list(findings())
