"""A run that was made before, opened again: its student at any of its checkpoints, to be scored or written down."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spmd_distill.build import Setup, load_text, set_up
from spmd_distill.checkpoint import Checkpoints
from spmd_distill.config import RunConfig, parse_config
from spmd_distill.errors import UserError
from spmd_distill.finish import describe_run
from spmd_distill.loading import Say
from spmd_distill.pairing import check_paired, paired_as_in
from spmd_distill.pretrained import save_pretrained
from spmd_distill.runfolder import RunFolder
from spmd_distill.scoring import heldout_batches, score
from spmd_distill.state import abstract_state
from spmd_distill.types import Params


@dataclass(frozen=True)
class OpenedRun:
    """The parts of a run, and its student as a checkpoint has it."""

    folder: RunFolder
    setup: Setup
    step: int
    """Optimizer steps that the student has behind it."""
    params: Params
    """The student's parameters and those of losses inside the network (`Trained`), on their devices."""
    meta: dict[str, Any]
    """What the checkpoint remembers beside the state: held-out results ``before`` and ``after``, and more."""


def config_of(path: str | Path, settings: Sequence[str] = ()) -> RunConfig:
    """The settings that a run was made with, and flags on top of them. Raises `UserError` where there is no run."""
    folder = RunFolder.open(path)
    return replace(parse_config(settings, folder.config), run=str(folder.path))


def open_run(
    path: str | Path, step: int | None = None, settings: Sequence[str] = (), say: Say = lambda message: None
) -> OpenedRun:
    """Open a run's student as it was after ``step`` optimizer steps, or at its newest good checkpoint.

    The mesh is the run's own unless ``settings`` has another. Raises `UserError` where there is no run, no such
    checkpoint, or none that is undamaged.
    """
    config = config_of(path, settings)
    folder = RunFolder.open(path)
    start = folder.path / "start"
    setup = paired_as_in(set_up(config, say, start if (start / "config.json").exists() else None), folder)
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        state, meta = checkpoints.restore(step, like=abstract_state(setup.run, setup.tx))
    for bad, reason in checkpoints.bad.items():
        say(f"checkpoint {bad} is damaged ({reason}); taking {checkpoints.restored}")
    params = setup.run.evaluated_params(setup.tx)(state)
    return OpenedRun(folder, setup, int(state.step), params, meta)


def evaluate_run(opened: OpenedRun) -> dict[str, float]:
    """Score a run's student on its held-out text; nats a token and fractions, as in ``metrics.jsonl``."""
    return evaluate(opened.setup, opened.params, opened.step)


def evaluate_model(path: str | Path, settings: Sequence[str], say: Say = lambda message: None) -> dict[str, float]:
    """Score any checkpoint as the student of ``teacher.path`` on ``data.heldout``.

    Raises `UserError` for what cannot be opened, and where teacher and student do not share a vocabulary.
    """
    config = parse_config(["--student.init", str(path), *settings])
    if config.student.pruned:
        raise UserError(f"{path}: is scored as it is; leave out the settings of student that make it smaller.")
    setup = set_up(config, say)
    check_paired(setup)
    mapper = setup.run.mapper
    teacher = setup.pair.load_teacher(mapper)
    student = setup.pair.start_student(teacher, mapper, config.seed)
    return evaluate(setup, setup.run.trained.complete(student, mapper, config.seed), 0, teacher)


def evaluate(setup: Setup, params: Params, step: int, teacher: Params | None = None) -> dict[str, float]:
    """Score parameters of the student of ``setup`` on its held-out text."""
    heldout = load_text(setup).heldout
    if teacher is None:
        teacher = setup.pair.load_teacher(setup.run.mapper)
    return score(setup, setup.run.eval_step(), params, teacher, heldout_batches(setup, heldout), jnp.int32(step))


def export_run(opened: OpenedRun, out: str | Path, dtype: str | None = None, overwrite: bool = False) -> Path:
    """Write a run's student as a Hugging Face folder, in ``dtype`` or the type it was trained in; return the folder.

    Raises `UserError` where the folder may not be replaced or cannot be written.
    """
    setup, params = opened.setup, opened.setup.run.trained.parted(opened.params)[0]
    if dtype is not None:
        params = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree))(params)
    before, after = (opened.meta.get(when, {}) for when in ("before", "after"))
    try:
        return save_pretrained(
            out,
            setup.pair.student,
            params,
            like=setup.pair.origin,
            card=describe_run(setup, opened.folder.path.name, before, after),
            overwrite=overwrite,
        )
    except OSError as error:
        raise UserError(f"{out}: the student cannot be written there: {error}.") from error
