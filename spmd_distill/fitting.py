"""The compiled training step, in micro-batches that fit into a device's memory."""

import gc
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from spmd_distill.build import Setup
from spmd_distill.config import RunConfig
from spmd_distill.distributed import any_of, place_rows
from spmd_distill.guards import first_line, halved, is_out_of_memory, skip_of
from spmd_distill.program import Compiled, quieter_layout
from spmd_distill.state import compile_train_step
from spmd_distill.types import Batch, Metrics, Params, TrainState


class Halving(NamedTuple):
    """One cut of the micro-batches."""

    before: RunConfig
    after: RunConfig
    message: str


class FittingStep:
    """A training step that halves its micro-batches when a device runs out of memory.

    ``data.rows`` halves and ``data.micro_batches`` doubles, so that a step has the same samples and the same gradient:
    the loss is a sum over micro-batches, over the number of valid tokens of the whole step. A batch keeps the shape
    that its loader gives it; it is cut on the way to the devices, its rows in the same order.

    At run time one process halves alone: where there are several, the others are in the middle of the step's
    collectives and cannot agree on anything.
    """

    def __init__(self, setup: Setup, batch: Batch):
        """Compile the step of ``setup`` for host batches like ``batch [A, B, L]``, smaller where it does not fit.

        Raises `UserError` where the rows cannot be cut further, or where ``guards.out_of_memory`` says stop.
        """
        self.setup = setup
        """With the settings of the micro-batches that are used."""
        self.halvings: list[Halving] = []
        """Oldest first."""
        self._like = batch
        self._shardings = setup.run.mapper.shardings(setup.run.batch_specs(1))
        self.compiled: Compiled = self._compile()

    def __call__(self, state: TrainState, teacher: Params, batch: Batch, *limit: Any) -> tuple[TrainState, Metrics]:
        """Take a step on a placed batch; see `Distillation.train_step`.

        Raises:
            JaxRuntimeError: memory ran out and the state, which is donated, is lost: `halve`, and restore it.
            UserError: as for `halve`.
        """
        while True:
            try:
                return self.compiled(state, teacher, batch, *limit)
            except jax.errors.JaxRuntimeError as error:
                if jax.process_count() > 1 or not _is_whole(state):
                    raise
                self.halve(error)
            batch = self.place(jax.device_get(batch), [], 0)  # alone, a process holds all rows

    def place(self, batch: Batch, rows: list[int], count: int) -> Batch:
        """A host batch on the devices that hold it, cut; a process of several has its own ``rows`` of ``count`` alone,
        of a loader whose micro-batches are those that fit (see `place_rows`)."""
        alone = jax.process_count() == 1
        return place_rows(self.cut(batch) if alone else batch, self._shardings, rows, count)

    def cut(self, batch: Batch) -> Batch:
        """A host batch ``[A, B, L]`` of the loader's in the micro-batches that fit, its rows in the same order."""
        data = self.setup.config.data
        return jax.tree.map(lambda x: x.reshape(data.micro_batches, data.rows, *x.shape[2:]), batch)

    def quieter(self) -> tuple[str, float, float] | None:
        """A layout that moves less for the same step; see `quieter_layout`."""
        return quieter_layout(self.setup.run, self.cut(self._like))

    def halve(self, error: BaseException) -> None:
        """Halve the micro-batches and compile again, after an error that came of the step or around it.

        Raises:
            UserError: they cannot be cut further, or ``guards.out_of_memory`` is ``stop``.
            BaseException: the error itself, where it is no lack of memory.
        """
        self._halve(error)
        if jax.process_count() == 1:
            self.compiled = self._compile()

    def _halve(self, error: BaseException) -> None:
        if not is_out_of_memory(error):
            raise error
        before = self.setup.config
        after = halved(before, error, self.setup.run.mapper.layout.batch_shards)
        message = (
            f"a device ran out of memory ({first_line(error)}): data.rows {before.data.rows} -> {after.data.rows}, "
            f"data.micro_batches {before.data.micro_batches} -> {after.data.micro_batches}; the gradient is the same"
        )
        self.setup = replace(self.setup, config=after)
        self.halvings.append(Halving(before, after, message))

    def _compile(self) -> Compiled:
        """The step in the largest micro-batches that every process can compile."""
        while True:
            setup, failed = self.setup, None
            try:
                found = compile_train_step(setup.run, setup.tx, self.cut(self._like), skip_of(setup.config))
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                found, failed = None, error.with_traceback(None)  # whose frames hold what was to be compiled
            if not any_of(failed is not None) and found is not None:
                return found
            gc.collect()
            self._halve(failed or jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: in another process"))


def _is_whole(state: TrainState) -> bool:
    """Whether a state can still be used: it was not given away, and what it comes of did not fail."""
    if any(x.is_deleted() for x in jax.tree.leaves(state)):
        return False
    try:
        jax.block_until_ready(state)
    except jax.errors.JaxRuntimeError:
        return False
    return True
