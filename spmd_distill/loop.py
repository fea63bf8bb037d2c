"""The loop: training steps with evaluations and checkpoints in between, on the one clock of optimizer steps."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from spmd_distill.build import Setup
from spmd_distill.checkpoint import Checkpoints
from spmd_distill.data import AbstractRows, Loader, Prefetch, eval_batches
from spmd_distill.distributed import any_of, is_first, place
from spmd_distill.errors import UserError
from spmd_distill.guards import StopSignal
from spmd_distill.metrics import MetricWriter, perplexity
from spmd_distill.program import Compiled
from spmd_distill.progress import TrainProgress
from spmd_distill.runfolder import RunFolder
from spmd_distill.state import abstract_state, create_state
from spmd_distill.types import Batch, Metrics, Params, TrainState


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; what it knew is saved, and the message says how to go on."""


@dataclass
class Result:
    """What the loop ends with."""

    state: TrainState
    before: dict[str, float]
    after: dict[str, float]
    tokens: int
    """Valid training tokens seen, over all sessions of the run."""
    tokens_per_second: float
    """Valid tokens a second of this session's training steps, without the first (which warms up)."""


class Loop:
    """Training steps with evaluations and checkpoints in between, on the one clock of optimizer steps."""

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        progress: TrainProgress,
        step: Compiled,
        teacher: Params,
        loader: Loader,
        heldout: Mapping[str, AbstractRows],
    ):
        config, run = setup.config, setup.run
        self.setup, self.config, self.folder, self.progress, self.teacher = setup, config, folder, progress, teacher
        self.loader = loader
        self.heldout = heldout_batches(setup, heldout)
        self.train_step, self.eval_step = step, run.eval_step()
        self.batch_shardings = run.mapper.shardings(run.batch_specs(1))

    def run(self, resume: bool) -> Result:
        """Train to the configured step; see `distil`."""
        config = self.config
        with Checkpoints(self.folder.checkpoints, keep=config.checkpoint.keep) as checkpoints:
            if resume:
                state, meta = self._restore(checkpoints)
            else:
                state, meta = self._start(), dict[str, Any](tokens=0)
            first = int(state.step)
            with MetricWriter(self.folder.path, resume_from=first if resume else None, enabled=is_first()) as writer:
                if "before" not in meta:
                    with self.progress.stage("evaluating the untrained student"):
                        meta["before"] = meta["after"] = self.evaluate(state, writer)
                return self._train(state, meta, first, writer, checkpoints)

    def _train(
        self, state: TrainState, meta: dict[str, Any], first: int, writer: MetricWriter, checkpoints: Checkpoints
    ) -> Result:
        config, timed, tokens_timed = self.config, 0.0, 0
        steps = Prefetch(self.loader.batch, first, config.steps, config.data.prefetch)
        with StopSignal() as stop, steps as batches:
            for step in range(first + 1, config.steps + 1):
                began = time.monotonic()
                batch = place(batches.get(step - 1), self.batch_shardings)
                state, metrics = jax.block_until_ready(self.train_step(state, self.teacher, batch))
                seconds = time.monotonic() - began
                values = metric_values(metrics)
                tokens = int(jax.device_get(metrics["loss"].count))
                meta["tokens"] += tokens
                values |= {**self.setup.scheduled(step - 1), "tokens": meta["tokens"], "data_wait": batches.waited}
                if step > first + 1:  # the first one warms up
                    timed, tokens_timed = timed + seconds, tokens_timed + tokens
                    values["tokens_per_second"] = tokens / seconds
                writer.write(step, values, "train")
                self._stop_if_not_finite(step, values)
                self.progress.update(step, values["loss"], values.get("kl"), values.get("tokens_per_second"))
                last, stopping = step == config.steps, any_of(stop.requested is not None)
                if last or step % config.eval.every == 0:
                    with self.progress.stage(f"evaluating at step {step}"):
                        meta["after"] = self.evaluate(state, writer)
                if last or stopping or step % config.checkpoint.every == 0:
                    self._save(checkpoints, state, step, meta)
                if stopping and not last:
                    checkpoints.wait()
                    signal = stop.requested or "a signal to another process"
                    raise Interrupted(
                        f"Stopped by {signal} at step {step} of {config.steps}, with a checkpoint saved. "
                        f"Go on with: spmd-distill train --resume {self.folder.path}"
                    )
        per_second = tokens_timed / timed if timed else 0.0
        return Result(state, meta["before"], meta["after"], meta["tokens"], per_second)

    def evaluate(self, state: TrainState, writer: MetricWriter) -> dict[str, float]:
        """Metrics over the held-out rows, averaged over their valid tokens."""
        values = score(self.setup, self.eval_step, state.params, self.teacher, self.heldout, state.step)
        writer.write(int(state.step), values, "eval")
        return values

    def _start(self) -> TrainState:
        run, setup = self.setup.run, self.setup
        with self.progress.stage("making the student"):
            params = setup.pair.start_student(self.teacher, run.mapper, self.config.seed)
            return jax.block_until_ready(create_state(run, setup.tx, params, self.config.seed))

    def _restore(self, checkpoints: Checkpoints) -> tuple[TrainState, dict[str, Any]]:
        with self.progress.stage("restoring the newest good checkpoint"):
            state, meta = checkpoints.restore(like=abstract_state(self.setup.run, self.setup.tx))
        for step, reason in checkpoints.bad.items():
            self.progress.note(f"checkpoint {step} is damaged ({reason}); going on from {checkpoints.restored}")
        self.loader.resume(meta["data"], int(state.step))
        found, expected = self.setup.pair.tokenizer.fingerprint(), meta["tokenizer"]
        if found != expected:
            raise UserError(
                f"The run in {self.folder.path} used another tokenizer (fingerprint {expected[:12]}, now "
                f"{found[:12]}). Give the teacher it was started with."
            )
        return state, meta

    def _save(self, checkpoints: Checkpoints, state: TrainState, step: int, meta: dict[str, Any]) -> None:
        fingerprint = self.setup.pair.tokenizer.fingerprint()
        checkpoints.save(step, state, {**meta, "data": self.loader.state(step), "tokenizer": fingerprint})

    def _stop_if_not_finite(self, step: int, values: dict[str, float]) -> None:
        bad = [name for name in ("loss", "grad_norm") if not abs(values[name]) < float("inf")]
        if bad:
            raise UserError(
                f"Step {step}: {bad[0]} is {values[bad[0]]}, so the run stops here; checkpoints of earlier steps are "
                f"in {self.folder.checkpoints}. A lower optimizer.learning_rate or float32 compute usually mends it."
            )


def heldout_batches(setup: Setup, heldout: Mapping[str, AbstractRows]) -> dict[str, list[Batch]]:
    """The batches that an evaluation scores: ``eval.rows`` rows of every set, spread over it."""
    config = setup.config
    return {name: eval_batches(rows.spread(config.eval.rows), config.data.rows) for name, rows in heldout.items()}


def score(
    setup: Setup, step: Any, student: Params, teacher: Params, sets: Mapping[str, Sequence[Batch]], clock: Any
) -> dict[str, float]:
    """Metrics over all sets, averaged over their valid tokens; of several, also each one's own, as ``kl/NAME``."""
    found = {name: setup.run.evaluate(step, student, teacher, batches, clock) for name, batches in sets.items()}
    whole, *others = found.values()
    for metrics in others:
        whole = {key: whole[key] + metrics[key] for key in whole}
    values = metric_values(whole)
    if len(found) > 1:
        for name, metrics in found.items():
            values |= {f"{key}/{name}": value for key, value in metric_values(metrics).items()}
    return values


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Averages on the host by the names of ``metrics.jsonl``, perplexities among them."""
    values = {name: float(mean.value) for name, mean in jax.device_get(metrics).items()}
    named = {name: values[f"ce_{name}"] for name in ("student", "teacher") if f"ce_{name}" in values}
    return values | {f"perplexity_{name}": perplexity(value) for name, value in named.items()}
