"""The loop: training steps with evaluations and checkpoints in between, on the one clock of optimizer steps."""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmd_distill.checkpoint import Mark
from spmd_distill.data import AbstractRows, Prefetch
from spmd_distill.distributed import any_of, held_rows, is_first
from spmd_distill.fitting import FittingStep
from spmd_distill.guards import Interrupted, Profile, name_rows, skip_of
from spmd_distill.metrics import Meter, MetricWriter, Sink, Work
from spmd_distill.metrics.steplog import Seen, StepLog
from spmd_distill.samples import Samples
from spmd_distill.saving import Saver
from spmd_distill.scoring import bad_rows, heldout_batches, score
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

    def __init__(
        self,
        saver: Saver,
        step: FittingStep,
        teacher: Params,
        heldout: Mapping[str, AbstractRows],
        work: Work = Work(),  # noqa: B008  (frozen)
    ):
        """Make ready to train.

        Args:
            saver: the checkpoints, and with them the run.
            step: the compiled training step.
            teacher: its weights, placed.
            heldout: the held-out sets by name.
            work: what a step asks of the devices, for the utilisation.
        """
        self.saver, self.train_step, self.teacher = saver, step, teacher
        self.setup, self.progress, self.loader, self.session = saver.setup, saver.progress, saver.loader, saver.session
        self.folder, self.stop, self.watch = self.session.folder, self.session.stop, saver.watch
        self.config, run = self.setup.config, self.setup.run
        self.sets, self.heldout = heldout, heldout_batches(self.setup, heldout)
        self.eval_step, self.evaluated = run.eval_step(), run.evaluated_params(self.setup.tx)
        self.samples, self.meter = Samples(self.setup, teacher, self.folder.path), Meter(work)
        self.on_cpu = run.mapper.devices[0].platform == "cpu"
        shape = (self.loader.micro_batches, self.loader.batch_rows, self.loader.rows.length)
        self.rows = held_rows(run.mapper.shardings(run.batch_specs(1)).tokens, shape)
        """Of every micro-batch, those that this process's devices hold, and no others are made here."""
        self.judges_spikes = skip_of(self.config).spike
        self._measured: list[dict[str, float]] = []
        """What the guards measured since the last line."""
        self._halvings = 0
        """How many halvings of the micro-batches were said."""

    def run(self, begun: Callable[[bool], Sequence[Sink]] = lambda resume: ()) -> Result:
        """Train to the configured step; see `distil`. A run without a checkpoint is resumed from its beginning.

        ``begun`` is called when nothing can refuse the run any more, and before it changes anything in its folder; it
        is told whether the run is resumed, and returns what takes the metrics beside ``metrics.jsonl`` and TensorBoard.
        After a lack of memory that took the state with it, the run is resumed right here, and ``begun`` called again.
        """
        with self.stop.hold(), self.saver.opened():
            while True:
                try:
                    return self._run(begun)
                except jax.errors.JaxRuntimeError as error:
                    self._out_of_memory(error)
                gc.collect()  # the error is gone, and with it what the frames it came through held on devices
                self.session = self.saver.session = self.session.again(self.train_step.setup.config)
                self.meter.stop()
                self._measured.clear()

    def _run(self, begun: Callable[[bool], Sequence[Sink]]) -> Result:
        """The run from the newest checkpoint, or from its beginning, to its end."""
        resume, saver = self.session.resume, self.saver
        with self.stop.released():
            if self.session.has_checkpoints:
                state, meta = saver.restore()
            else:
                state, meta = self._start(), dict[str, Any](tokens=0)
        first = int(state.step)
        sinks = begun(resume)
        if resume:
            self.session.note(first, self.config)
        resume_from = None if not resume else first if first else -1  # an evaluation before step 1 is made again
        with MetricWriter(self.folder.path, resume_from, enabled=is_first(), sinks=sinks) as writer:
            if resume:
                self.watch.goes_on(first, writer.seconds, meta.get("guards"))
                self.samples.cut_back(first if first else -1)
            self._refit(first)
            if "before" not in meta:
                meta["before"] = meta["after"] = self.evaluate(state, writer, "evaluating the untrained student")
                saver.check_metric(meta["before"])
            state = self._train(state, meta, first, writer)
            state, after = saver.to_export(state, meta)
            params, rate = self.evaluated(state), self.meter.tokens_per_second
            return Result(params, int(state.step), meta["before"], after, meta["tokens"], rate)

    def _train(self, state: TrainState, meta: dict[str, Any], first: int, writer: MetricWriter) -> TrainState:
        config, saver = self.config, self.saver
        if meta.pop("evaluation_due", False):
            saver.save(first, state, meta, self._evaluate_at(first, state, meta, writer))
        # On a CPU two programs at once could wait for each other's collectives for ever, and what is a spike depends on
        # the step before: then every step is waited for, and its numbers are there.
        at_once = self.on_cpu or self.judges_spikes
        log = StepLog(
            self.meter,
            every=config.logging.every,
            look=1 if self.judges_spikes else None,
            lag=0 if at_once else 1,
            tokens=meta["tokens"],
        )
        profile = Profile(
            config, self.watch.events, first, self.train_step.quieter, enabled=is_first() and not self.on_cpu
        )
        mine = lambda step: self.loader.local(step, self.rows)  # noqa: E731
        with Prefetch(mine, first, config.steps, config.data.prefetch) as batches:
            for step in range(first + 1, config.steps + 1):
                self.meter.start()
                with self.meter.waiting():
                    batch = self.train_step.place(batches.get(step - 1), self.rows, self.loader.batch_rows)
                limit = (np.float32(self.watch.limit),) if self.judges_spikes else ()
                profile.before(step, state)
                state, metrics = self.train_step(state, self.teacher, batch, *limit)
                profile.after(step, metrics)
                self._refit(step)
                if at_once:
                    jax.block_until_ready((state, metrics))
                self._look(log.add(step, metrics), state, writer)
                last, mark = step == config.steps, None
                if last or step % config.eval.every == 0:
                    self._look(log.settle(), state, writer)
                    try:
                        mark = self._evaluate_at(step, state, meta, writer)
                    except Interrupted:
                        meta["evaluation_due"] = True  # when the run goes on
                stopping = any_of(self.stop.reached(step))
                if last or stopping or mark is not None or step % config.checkpoint.every == 0:
                    self._look(log.settle(), state, writer)
                    meta["tokens"] = log.tokens
                    saver.save(step, state, meta, mark)
                saver.checkpoints.check()
                if stopping and (not last or "evaluation_due" in meta):
                    saver.checkpoints.wait()
                    raise self.stop.interrupted(f" at step {step} of {config.steps}")
        return state

    def _look(self, steps: Iterable[Seen], state: TrainState, writer: MetricWriter) -> None:
        """Write, show and judge what has come from the devices: every step once, in order.

        On an accelerator the next step runs already, and with ``logging.every`` more of them; evaluations and
        checkpoints come after the steps before them have been judged.
        """
        for seen in steps:
            scheduled = {} if seen.line is None else self.setup.scheduled(seen.step - 1, self.watch.skipped)
            measured = self.watch.measure(seen.step, seen.values)
            self._measured.append(measured)
            if seen.line is not None:
                shares = {
                    name: last if name.endswith("_total") else float(np.mean([m[name] for m in self._measured]))
                    for name, last in measured.items()
                }
                self._measured.clear()
                line = {**seen.line, **scheduled, **shares}
                writer.write(seen.step, line, "train")
                self.progress.update(seen.step, line)
            self._judge(seen.step, state, {**seen.values, **measured})

    def _evaluate_at(self, step: int, state: TrainState, meta: dict[str, Any], writer: MetricWriter) -> Mark | None:
        """Evaluate the state after a step; a mark for its checkpoint where it is the best so far.

        Raises `Interrupted` where a signal breaks it off, with nothing changed.
        """
        meta["after"] = after = self.evaluate(state, writer, f"evaluating at step {step}")
        return self.saver.judge(step, after, meta)

    def evaluate(self, state: TrainState, writer: MetricWriter, stage: str) -> dict[str, float]:
        """Metrics over the held-out rows, averaged over their valid tokens; written, with samples, as all is there.

        Raises `Interrupted` where a signal breaks it off, with nothing written.
        """
        step = int(state.step)
        with self.stop.released(), self.progress.stage(stage):
            params = self.evaluated(state)
            values = score(self.setup, self.eval_step, params, self.teacher, self.heldout, state.step)
            continued = self.samples.at(step, params)
        writer.write(step, values, "eval")
        self.samples.write(step, continued, writer)
        return values

    def _start(self) -> TrainState:
        run, setup = self.setup.run, self.setup
        with self.progress.stage("making the student"):
            params = setup.pair.start_student(self.teacher, run.mapper, self.config.seed)
            return jax.block_until_ready(create_state(run, setup.tx, params, self.config.seed))

    def _refit(self, step: int) -> None:
        """Go on with the micro-batches that the step is compiled for, and say so where they were halved."""
        for before, after, message in self.train_step.halvings[self._halvings :]:
            values = {"rows": after.data.rows, "micro_batches": after.data.micro_batches}
            self.watch.events.add(step, "out_of_memory", message, values)
            if is_first():
                self.session.halved(before, after)
        self._halvings = len(self.train_step.halvings)
        self.setup = self.saver.setup = self.train_step.setup
        if self.config != self.setup.config:
            self.config, self.heldout = self.setup.config, heldout_batches(self.setup, self.sets)

    def _out_of_memory(self, error: Exception) -> None:
        """Halve the micro-batches. Raises the error where it is another one, or where other processes wait for this."""
        self.train_step.halve(error)
        if jax.process_count() > 1:
            before, after, message = self.train_step.halvings[-1]
            self.session.halved(before, after)
            error.add_note(f"{message}, from the next start on. Start all processes again, with --resume.")
            raise error

    def _judge(self, step: int, state: TrainState, values: dict[str, float]) -> None:
        """Let the guards look at a step; what they find there may end the run with a `UserError`."""

        def find(names: Sequence[str]) -> str:
            samples, batch = self.loader.samples(step - 1), self.train_step.cut(self.loader.batch(step - 1))
            rows = list(range(len(samples)))
            if names:
                rows = bad_rows(self.setup, self.eval_step, state.params, self.teacher, batch, names, state.step)
            return name_rows([samples[i] for i in rows]) if rows else ""

        self.watch.check(step, values, find)
