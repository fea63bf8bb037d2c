"""A disk that fails in mid-run: one sentence, exit code 2, no finished step lost, and the run goes on bit for bit."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from tiny import lighten, tiny_run

from spmd_distill import cli
from spmd_distill.checkpoint import Checkpoints, manifest
from spmd_distill.config import to_dict
from spmd_distill.metrics import CLOCKED, read_metrics

FLAGS = ("--mesh", "single", "--steps", "6", "--checkpoint.every", "2", "--eval.every", "6", "--eval.prompts", "[]")

# ---------------------------------------------------------------------------------------------------------------------
# What happens, in a process of its own: a save that fails leaves threads


def full(run: Path, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Step 4 finds no space for the last of its files."""
    write = manifest.write_manifest

    def refuse(folder: Path) -> None:
        if folder.name.startswith("4"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        write(folder)

    patch.setattr(manifest, "write_manifest", refuse)
    return lambda: None


def full_to_the_last_byte(run: Path, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    """The disk of the run has no room for anything."""
    return lambda: fill(run.parent)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free)


def read_only(run: Path, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    """No folder can be made below the run any more."""
    make = os.mkdir

    def refuse(path, *rest, **named):
        if os.fspath(path).startswith(str(run)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))
        return make(path, *rest, **named)

    return lambda: patch.setattr(os, "mkdir", refuse)


def checkpoints_gone(run: Path, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    """The folder of the checkpoints is taken away."""
    return lambda: os.rename(run / "checkpoints", away(run))


def run_gone(run: Path, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    """The whole folder is taken away, as where a disk is unmounted."""
    return lambda: os.rename(run, away(run))


def away(run: Path) -> Path:
    return run.with_name(f"{run.name}.away")


FAILURES = {
    "full": "cannot write: No space left on device (finished steps [2] are intact)",
    "read_only": "cannot write: Read-only file system (finished steps [2] are intact)",
    "checkpoints_gone": "is gone, so nothing can be saved",
}
FULL = ("full_to_the_last_byte",)
GONE_WHILE_SAVING = "run_gone_while_saving"


def fail(home: str, name: str) -> None:
    """The whole command, which trains in ``home/NAME/run``, where something happens before step 4 is saved.

    Or while step 2 is being saved, if the name says so.
    """
    from spmd_distill.runtime import prepare_jax

    prepare_jax(8, fast_compile=True)
    patch, run = pytest.MonkeyPatch(), Path(home) / name / "run"
    lighten(patch)
    run.parent.mkdir(exist_ok=True)
    save, strike = Checkpoints.save, globals()[name.removesuffix("_while_saving")](run, patch)

    def struck(self, step, *rest, **named):
        if step == 4 and name != GONE_WHILE_SAVING:
            self.wait()
            strike()
        save(self, step, *rest, **named)
        if step == 2 and name == GONE_WHILE_SAVING:
            strike()

    patch.setattr(Checkpoints, "save", struck)
    sys.argv = ["spmd-distill", "train", f"{home}/run.yaml", "--run", str(run)]
    cli.command()


# ---------------------------------------------------------------------------------------------------------------------
# What is left


@pytest.fixture(scope="module")
def home(light, tmp_path_factory) -> Iterator[Path]:
    """A teacher, a text, a run that nothing disturbed, and where this user may mount one, a disk of 4 MiB."""
    folder = tmp_path_factory.mktemp("disk")
    config = tiny_run(folder, *FLAGS)
    (folder / "run.yaml").write_text(yaml.safe_dump(to_dict(config)))
    for name in FULL:
        (folder / name).mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder / name)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            (folder / name).rmdir()
    yield folder
    for name in FULL:
        if (folder / name).exists():
            subprocess.run(["umount", "-l", str(folder / name)], check=False)


@pytest.fixture(scope="module")
def failed(home) -> Callable[[str], tuple[int, str]]:
    """A failure to be had by its name: the exit code of the command, and what it said."""
    here = Path(__file__)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(home / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    given = {**os.environ, **cache}

    def train(name: str) -> tuple[int, str]:
        call = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem} as this; "
        call += f"this.fail({str(home)!r}, {name!r})"
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=400, env=given)
        return done.returncode, " ".join(done.stderr.split())

    return train


@pytest.fixture(scope="module")
def expected(home) -> Path:
    """The run that nothing disturbed."""
    from spmd_distill.cli import main

    assert main(["train", str(home / "run.yaml"), "--run", str(home / "undisturbed")]) == 0
    return home / "undisturbed"


@pytest.mark.parametrize("name", [*FAILURES, *FULL])
def test_the_run_ends_with_a_sentence_and_goes_on_bit_for_bit(home, failed, expected, name):
    if name in FULL and not (home / name).exists():
        pytest.skip("this user may not mount a file system")
    code, said = failed(name)
    run = home / name / "run"
    assert code == 2, said
    assert said.count("spmd-distill: error: ") == 1
    error = said.partition("spmd-distill: error: ")[2]
    assert FAILURES.get(name, "Step 2 is saved. Go on with: ") in error and str(run) in error
    assert "Traceback" not in said and "never awaited" not in said
    mend(run)
    goes_on(run, expected)


def mend(run: Path) -> None:
    (run.parent / "filler").unlink(missing_ok=True)
    if away(run).exists():
        there = run if (away(run) / "config.yaml").exists() else run / "checkpoints"
        shutil.rmtree(there, ignore_errors=True)
        os.rename(away(run), there)


def goes_on(run: Path, expected: Path) -> None:
    """Step 2 is whole, and the run that goes on from it is the one that nothing disturbed."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    from spmd_distill.cli import main
    from spmd_distill.doctor.run import check_run

    report = check_run(run)
    assert report.resumable and report.step == 2
    assert not [finding for finding in report.findings if finding.status == "problem" and finding.about != "disk"]
    assert main(["train", "--resume", str(run)]) == 0
    assert trace(run) == trace(expected)
    with ocp.StandardCheckpointer() as reader:
        found, wanted = (jax.tree.leaves(reader.restore(r / "checkpoints/6/state")) for r in (run, expected))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def trace(run: Path) -> list[tuple]:
    return [(m.step, m.split, {k: v for k, v in m.values.items() if k not in CLOCKED}) for m in read_metrics(run)]


def test_a_folder_that_vanishes_while_it_is_saved_to_is_no_hang_and_no_traceback(failed):
    code, said = failed(GONE_WHILE_SAVING)
    assert code == 2, said
    assert "Traceback" not in said and "never awaited" not in said
    assert said.count("spmd-distill: error: ") == 1
