"""The checkpoints of a run: what is saved beside the state, what is checked on the way back, which step is the best."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from spmd_distill.build import Setup
from spmd_distill.checkpoint import Checkpoints, Mark
from spmd_distill.config import to_dict
from spmd_distill.data import AbstractRows, Loader
from spmd_distill.errors import UserError
from spmd_distill.guards import Watch
from spmd_distill.progress import TrainProgress
from spmd_distill.resuming import Session, Sources
from spmd_distill.state import abstract_state
from spmd_distill.types import TrainState


class Saver:
    """Saves and restores one run. Enter `opened` first."""

    def __init__(
        self,
        setup: Setup,
        session: Session,
        progress: TrainProgress,
        loader: Loader,
        heldout: Mapping[str, AbstractRows],
        watch: Watch,
    ):
        self.setup, self.session, self.progress, self.loader = setup, session, progress, loader
        self.watch = watch
        self.wanted = setup.config.checkpoint
        self.sources = Sources(setup.pair.checkpoint.source.path, setup.pair.tokenizer, heldout)
        self.checkpoints: Checkpoints

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """The folder of checkpoints, until the last of them is committed."""
        keep = {"keep": self.wanted.keep, "keep_every": self.wanted.keep_every, "best": self.wanted.best}
        with Checkpoints(self.session.folder.checkpoints, **keep) as self.checkpoints:
            yield

    def restore(self) -> tuple[TrainState, dict[str, Any]]:
        """The newest good checkpoint: its state, and what was saved beside it.

        Raises `UserError` where there is none, or where the run is not the one that was saved.
        """
        folder, steps = self.session.folder.path, self.setup.config.steps
        with self.progress.stage("restoring the newest good checkpoint"):
            state, meta = self.checkpoints.restore(like=abstract_state(self.setup.run, self.setup.tx))
        for step, reason in self.checkpoints.bad.items():
            self.progress.note(f"checkpoint {step} is damaged ({reason}); going on from {self.checkpoints.restored}")
        if int(state.step) > steps:
            raise UserError(
                f"The run in {folder} stands at step {int(state.step)}, beyond steps: {steps}. Give at least as many "
                f"--steps, or start a new run."
            )
        self.loader.resume(meta["data"], int(state.step))
        for note in self.sources.check(meta, folder, self.session.allow_changes):
            self.progress.note(note)
        if meta.get("best", {}).get("step") != self.checkpoints.best:
            meta.pop("best", None)  # of another metric, or lost: the next evaluation sets the mark
        return state, meta

    def save(self, step: int, state: TrainState, meta: Mapping[str, Any], mark: Mark | None = None) -> None:
        """Save a step, with all that a resume compares or needs; see `Checkpoints.save`."""
        held = {"data": self.loader.state(step), "settings": to_dict(self.setup.config), "guards": self.watch.state()}
        self.checkpoints.save(step, state, {**meta, **held, **self.sources.meta()}, mark)

    def check_metric(self, found: Mapping[str, float]) -> None:
        """Raise `UserError` where the metric that says which step is best is not among these."""
        metric = self.wanted.best
        if metric is not None and metric not in found:
            raise UserError(
                f"checkpoint.best is {metric}, which this objective does not measure; it measures {', '.join(found)}."
            )

    def judge(self, step: int, found: dict[str, float], meta: dict[str, Any]) -> Mark | None:
        """A mark for the checkpoint of a step whose held-out results are the best so far; ``meta`` remembers them."""
        metric = self.wanted.best
        if metric is None:
            return None
        mark, best = Mark(metric, found[metric]), meta.get("best")
        if not mark.beats(None if best is None else Mark(best["metric"], best["value"])):
            return None
        meta["best"] = {"step": step, **mark._asdict(), "metrics": found}
        return mark

    def to_export(self, state: TrainState, meta: Mapping[str, Any]) -> tuple[TrainState, dict[str, float]]:
        """The state that is handed on, and its held-out results: the last one, or the best where the run file says so.

        Where the best step is damaged, the last one is, and the progress says it.
        """
        last, best = (state, meta["after"]), self.checkpoints.best
        if self.wanted.export == "last" or best is None or best == int(state.step):
            return last
        with self.progress.stage(f"restoring the best step, {best}"):
            try:
                found, _ = self.checkpoints.read(best, abstract_state(self.setup.run, self.setup.tx))
            except UserError as error:
                self.progress.note(f"{error}. The last step is exported instead of the best one")
                return last
        return found, meta["best"]["metrics"]
