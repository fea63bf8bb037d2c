"""The loop: training steps with evaluations and checkpoints in between, on the one clock of optimizer steps."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmd_distill.checkpoint import Mark
from spmd_distill.data import AbstractRows, Prefetch
from spmd_distill.distributed import any_of, is_first, place
from spmd_distill.guards import Interrupted, name_rows, skip_of
from spmd_distill.metrics import MetricWriter
from spmd_distill.program import Compiled
from spmd_distill.saving import Saver
from spmd_distill.scoring import bad_rows, heldout_batches, metric_values, score
from spmd_distill.state import create_state
from spmd_distill.types import Params, TrainState


@dataclass
class Result:
    """What the loop ends with."""

    params: Params
    """The student's: those that are evaluated and exported."""
    step: int
    """Optimizer steps that they have behind them."""
    before: dict[str, float]
    after: dict[str, float]
    tokens: int
    """Valid training tokens seen, over all sessions of the run."""
    tokens_per_second: float
    """Valid tokens a second of this session's training steps, without the first (which warms up)."""


class Loop:
    """Training steps with evaluations and checkpoints in between, on the one clock of optimizer steps."""

    def __init__(self, saver: Saver, step: Compiled, teacher: Params, heldout: Mapping[str, AbstractRows]):
        self.saver, self.train_step, self.teacher = saver, step, teacher
        self.setup, self.progress, self.loader, self.session = saver.setup, saver.progress, saver.loader, saver.session
        self.folder, self.stop, self.watch = self.session.folder, self.session.stop, saver.watch
        self.config, run = self.setup.config, self.setup.run
        self.heldout = heldout_batches(self.setup, heldout)
        self.eval_step, self.evaluated = run.eval_step(), run.evaluated_params(self.setup.tx)
        self.batch_shardings = run.mapper.shardings(run.batch_specs(1))
        self.judges_spikes = skip_of(self.config).spike
        self._timed, self._tokens_timed = 0.0, 0

    def run(self) -> Result:
        """Train to the configured step; see `distil`. A run without a checkpoint is resumed from its beginning."""
        resume, saver = self.session.resume, self.saver
        with self.stop.hold(), saver.opened():
            with self.stop.released():
                if self.session.has_checkpoints:
                    state, meta = saver.restore()
                else:
                    state, meta = self._start(), dict[str, Any](tokens=0)
            first = int(state.step)
            if resume:
                self.session.note(first, self.config)
            resume_from = None if not resume else first if first else -1  # an evaluation before step 1 is made again
            with MetricWriter(self.folder.path, resume_from=resume_from, enabled=is_first()) as writer:
                if resume:
                    self.watch.goes_on(first, writer.seconds, meta.get("guards"))
                if "before" not in meta:
                    with self.stop.released(), self.progress.stage("evaluating the untrained student"):
                        meta["before"] = meta["after"] = self.evaluate(state, writer)
                    saver.check_metric(meta["before"])
                state = self._train(state, meta, first, writer)
                per_second = self._tokens_timed / self._timed if self._timed else 0.0
                state, after = saver.to_export(state, meta)
                return Result(self.evaluated(state), int(state.step), meta["before"], after, meta["tokens"], per_second)

    def _train(self, state: TrainState, meta: dict[str, Any], first: int, writer: MetricWriter) -> TrainState:
        config, saver = self.config, self.saver
        if meta.pop("evaluation_due", False):
            saver.save(first, state, meta, self._evaluate_at(first, state, meta, writer))
        with Prefetch(self.loader.batch, first, config.steps, config.data.prefetch) as batches:
            for step in range(first + 1, config.steps + 1):
                began = time.monotonic()
                batch = place(batches.get(step - 1), self.batch_shardings)
                limit = (np.float32(self.watch.limit),) if self.judges_spikes else ()
                state, metrics = jax.block_until_ready(self.train_step(state, self.teacher, batch, *limit))
                seconds = time.monotonic() - began
                values = metric_values(metrics)
                tokens = int(jax.device_get(metrics["loss"].count))
                meta["tokens"] += tokens
                values |= {**self.setup.scheduled(step - 1, self.watch.skipped), "tokens": meta["tokens"]}
                values |= {"data_wait": batches.waited, **self.watch.measure(step, values)}
                if step > first + 1:  # the first one warms up
                    self._timed, self._tokens_timed = self._timed + seconds, self._tokens_timed + tokens
                    values["tokens_per_second"] = tokens / seconds
                writer.write(step, values, "train")
                self._judge(step, state, values)
                self.progress.update(step, values["loss"], values.get("kl"), values.get("tokens_per_second"))
                last, mark = step == config.steps, None
                if last or step % config.eval.every == 0:
                    try:
                        mark = self._evaluate_at(step, state, meta, writer)
                    except Interrupted:
                        meta["evaluation_due"] = True  # when the run goes on
                stopping = any_of(self.stop.reached(step))
                if last or stopping or mark is not None or step % config.checkpoint.every == 0:
                    saver.save(step, state, meta, mark)
                saver.checkpoints.check()
                if stopping and (not last or "evaluation_due" in meta):
                    saver.checkpoints.wait()
                    raise self.stop.interrupted(f" at step {step} of {config.steps}")
        return state

    def _evaluate_at(self, step: int, state: TrainState, meta: dict[str, Any], writer: MetricWriter) -> Mark | None:
        """Evaluate the state after a step; a mark for its checkpoint where it is the best so far.

        Raises `Interrupted` where a signal breaks it off, with nothing changed.
        """
        with self.stop.released(), self.progress.stage(f"evaluating at step {step}"):
            after = self.evaluate(state, writer)
        meta["after"] = after
        return self.saver.judge(step, after, meta)

    def evaluate(self, state: TrainState, writer: MetricWriter) -> dict[str, float]:
        """Metrics over the held-out rows, averaged over their valid tokens."""
        values = score(self.setup, self.eval_step, self.evaluated(state), self.teacher, self.heldout, state.step)
        writer.write(int(state.step), values, "eval")
        return values

    def _start(self) -> TrainState:
        run, setup = self.setup.run, self.setup
        with self.progress.stage("making the student"):
            params = setup.pair.start_student(self.teacher, run.mapper, self.config.seed)
            return jax.block_until_ready(create_state(run, setup.tx, params, self.config.seed))

    def _judge(self, step: int, state: TrainState, values: dict[str, float]) -> None:
        """Let the guards look at a step; what they find there may end the run with a `UserError`."""

        def find(names: Sequence[str]) -> str:
            samples, batch = self.loader.samples(step - 1), self.loader.batch(step - 1)
            rows = list(range(len(samples)))
            if names:
                rows = bad_rows(self.setup, self.eval_step, state.params, self.teacher, batch, names, state.step)
            return name_rows([samples[i] for i in rows]) if rows else ""

        self.watch.check(step, values, find)
