"""Worker of `step.py`: this library's training step under one layout, compiled and, if asked, run.

Its first message holds what is exact: memory, collectives, matmuls. Then ``{"steps": k}`` runs k steps.
"""

import argparse
import importlib.metadata
import math
from typing import Any

from _hlo import memory, read
from _worker import Channel, stopwatch
from _workload import Sizes, Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="fsdp2_tp4")
    parser.add_argument("--remat", default="none")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--vocab", type=int, default=Workload.vocab)
    parser.add_argument("--budget", type=int, default=None, help="memory of the head's chunks, in MiB")
    options = parser.parse_args()
    channel, work = Channel(), Workload(options.vocab)
    step = Step(work, options.layout, options.remat, options.budget)
    channel.say(step.facts())
    if not options.compile_only:
        step.prepare()
        for request in channel.requests():
            channel.say(step.run(request["steps"]))


class Step:
    """The step, compiled from shapes alone; `prepare` makes what it needs to run."""

    def __init__(self, work: Workload, layout: str, remat: str, budget: int | None = None):
        import jax
        import numpy as np
        import optax

        from spmd_distill.divergences import ForwardKL
        from spmd_distill.head import FusedHead
        from spmd_distill.mappers import make_mapper
        from spmd_distill.models import decoder
        from spmd_distill.objective import Objective
        from spmd_distill.state import abstract_state
        from spmd_distill.step import Distillation
        from spmd_distill.teachers import OnlineTeacher
        from spmd_distill.types import Batch

        self.work = work
        student, teacher = (decoder(_config(work, s, r)) for s, r in ((work.student, remat), (work.teacher, "none")))
        objective = Objective.mix(ForwardKL(), work.alpha, work.temperature)
        mapper = make_mapper("shard_map", layout)
        head = FusedHead(memory_budget=None if budget is None else budget * 2**20)
        self.run_ = Distillation(student, OnlineTeacher(teacher), objective, mapper, head)
        self.tx = optax.adamw(work.learning_rate)

        def described(shapes: Any, specs: Any) -> Any:
            shardings = mapper.shardings(specs)
            return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)

        x = jax.ShapeDtypeStruct((1, work.batch, work.length), np.int32)
        batch = Batch(x, x, jax.ShapeDtypeStruct(x.shape, np.bool_), x, x)
        state = abstract_state(self.run_, self.tx)
        self.gradient_bytes = sum(
            math.prod(p.sharding.shard_shape(p.shape)) * p.dtype.itemsize for p in jax.tree.leaves(state.params)
        )
        arguments = (
            state,
            described(teacher.abstract, teacher.specs(mapper.layout)),
            described(batch, self.run_.batch_specs(1)),
        )
        self.compiled = self.run_.train_step(self.tx).lower(*arguments).compile()

    def facts(self) -> dict[str, Any]:
        """What is known without running: bytes a device, collectives and matmuls of a step."""
        text = self.compiled.as_text()
        trips = self._trips(text)
        program = read(text, unknown_trips=trips)
        return {
            "version": importlib.metadata.version("jax"),
            "memory": memory(self.compiled),
            "gradient_bytes": self.gradient_bytes,
            "collectives": program.total.count,
            "wire_bytes": program.total.wire_bytes,
            "matmul_flops": program.matmul_flops,
            "unknown_loops": list(program.unknown_loops),
            "unknown_trips": trips,
        }

    def _trips(self, text: str) -> int:
        """How often the head's loop runs for the first batch: its bound is data, so the program does not say it.

        It goes over the valid labels of the data shard that has most. How many of them a trip takes is read off its
        matmuls: for each of them the student's logits and two gradients of its width, and the teacher's logits.
        """
        once, never = (read(text, unknown_trips=trips) for trips in (1, 0))
        if not once.unknown_loops:
            return 1
        work = self.work
        rows = self.run_.student.config.padded_vocab // work.mesh[1]
        of_a_token = 2 * rows * (3 * work.student.width + work.teacher.width)
        taken, rest = divmod(once.matmul_flops - never.matmul_flops, of_a_token)
        if rest or not taken:
            raise RuntimeError("The matmuls of the head's loop are not those of a whole number of tokens.")
        _, mask = next(work.batches())
        valid = int(mask[:, 1:].reshape(work.mesh[0], -1).sum(1).max())  # a row's first token is no label
        return -(-valid // taken)

    def prepare(self) -> None:
        """Random parameters, and the batches to come."""
        from spmd_distill.state import create_state, init_params

        run = self.run_
        self.state = create_state(run, self.tx, init_params(run.student, run.mapper, 2), 0)
        self.teacher = init_params(run.teacher.model, run.mapper, 1)
        self.batches = self.work.batches(seed=2)

    def run(self, steps: int) -> dict[str, Any]:
        """Seconds of a number of steps, from batches on the host to a finished state; the last loss."""
        import jax

        with stopwatch() as found:
            for _ in range(steps):
                batch = self._placed(*next(self.batches))
                self.state, metrics = self.compiled(self.state, self.teacher, batch)
            jax.block_until_ready(self.state)
        return found | {"loss": float(metrics["loss"].value)}

    def _placed(self, tokens: Any, mask: Any) -> Any:
        import jax
        import numpy as np

        from spmd_distill.types import Batch

        labels, counted = np.zeros_like(tokens), np.zeros_like(mask)
        labels[:, :-1], counted[:, :-1] = tokens[:, 1:], mask[:, 1:]
        positions = np.broadcast_to(np.arange(self.work.length, dtype=np.int32), tokens.shape)
        batch = Batch(tokens, labels, counted, positions, mask.astype(np.int32))
        batch = jax.tree.map(lambda x: x[None], batch)
        return jax.device_put(batch, self.run_.mapper.shardings(self.run_.batch_specs(1)))


def _config(work: Workload, sizes: Sizes, remat: str) -> Any:
    from dataclasses import asdict

    from spmd_distill.models import DecoderConfig

    return DecoderConfig(vocab_size=work.vocab, remat=remat, **asdict(sizes))


if __name__ == "__main__":
    main()
