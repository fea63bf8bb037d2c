"""Worker of `step.py`: google-tunix's `DistillationTrainer` with its `LogitStrategy`, in an environment of its own.

A step is two programs there: the teacher's forward pass, whose logits are an argument of the student's step, and that
step. The first message holds what is exact about both. Then ``{"steps": k}`` lets the library's own training loop go
on for k steps: its iterator of batches is what waits for requests.

Two things are done for tunix that it does not do by itself on CPU devices: its models' sharding constraints, which it
switches off there, are on, and batches arrive sharded. Both cost it less memory and traffic than its own way.
"""

import argparse
import importlib.metadata
from collections.abc import Iterator
from typing import Any

from _hlo import memory, read
from _worker import Channel, stopwatch
from _workload import Sizes, Workload

DATA, MODEL = "fsdp", "tp"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--vocab", type=int, default=Workload.vocab)
    options = parser.parse_args()
    channel, work = Channel(), Workload(options.vocab)
    training = Training(work)
    channel.say(training.facts())
    if not options.compile_only:
        training.serve(channel)


class Training:
    """A trainer as tunix's example for logit distillation makes it, on random models."""

    def __init__(self, work: Workload):
        import jax
        import optax
        from tunix.distillation import distillation_trainer, strategies
        from tunix.models.llama3 import model as llama
        from tunix.sft import utils

        self.work = work
        self.mesh = jax.make_mesh(work.mesh, (DATA, MODEL), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        llama.shard = self._constrain
        self.input_type = distillation_trainer.TrainingInput

        def forward(model: Any, input_tokens: Any, input_mask: Any, positions: Any, attention_mask: Any) -> Any:
            logits, _ = model(input_tokens, positions, None, attention_mask)
            return logits[:, :-1, :]

        def labels(input_tokens: Any, input_mask: Any, **_: Any) -> Any:
            one_hot = jax.nn.one_hot(input_tokens[:, 1:], work.vocab)
            return one_hot * input_mask[:, 1:, None].astype(one_hot.dtype)

        def model_inputs(x: Any) -> dict[str, Any]:
            mask = x.input_mask.astype(bool)
            return {
                "input_tokens": x.input_tokens,
                "input_mask": x.input_mask,
                "positions": utils.build_positions_from_mask(mask),
                "attention_mask": utils.make_causal_attn_mask(mask),
            }

        self.forward, self.model_inputs = forward, model_inputs
        self.teacher, student = self._model(work.teacher, 1), self._model(work.student, 2)
        self.teacher.eval()
        student.train()
        strategy = strategies.LogitStrategy(forward, forward, labels, temperature=work.temperature, alpha=work.alpha)
        config = distillation_trainer.TrainingConfig(eval_every_n_steps=10**9)
        self.trainer = distillation_trainer.DistillationTrainer(
            student, self.teacher, strategy, optax.adamw(work.learning_rate), config
        ).with_gen_model_input_fn(model_inputs)

    def facts(self) -> dict[str, Any]:
        """What is known of the two programs without running them, and the teacher's logits on their way between."""
        import jax
        from flax import nnx
        from tunix.sft import sharding_utils

        with self.mesh:
            first = self._input(*next(self.work.batches()))
            teacher = nnx.jit(self.forward).lower(self.teacher, **self.model_inputs(first)).compile()
            prepared = self.trainer._prepare_inputs(first)
            sharded = sharding_utils.shard_input(prepared, self.trainer.config.data_sharding_axis)
            self.trainer._shard_optimizer(self.mesh)
            step = nnx.jit(self.trainer._train_step, donate_argnames=("optimizer",))
            step = step.lower(self.trainer.model, self.trainer.optimizer, sharded).compile()

        def a_device(x: jax.Array) -> int:
            return x.addressable_shards[0].data.nbytes

        programs = [getattr(p, "compiled", p) for p in (teacher, step)]  # nnx wraps what jax compiled
        counted = [read(p.as_text()) for p in programs]
        return {
            "version": importlib.metadata.version("google-tunix"),
            "jax": importlib.metadata.version("jax"),
            "memory": dict(zip(("teacher", "step"), map(memory, programs), strict=True)),
            "logits": {"made": a_device(prepared.teacher_output), "passed_on": a_device(sharded.teacher_output)},
            "collectives": sum(p.total.count for p in counted),
            "wire_bytes": sum(p.total.wire_bytes for p in counted),
            "matmul_flops": sum(p.matmul_flops for p in counted),
            "unknown_loops": [name for p in counted for name in p.unknown_loops],
        }

    def serve(self, channel: Channel) -> None:
        """Run the library's training loop, as far as each request says."""
        import jax
        from flax import nnx

        batches = self.work.batches(seed=2)

        def feed() -> Iterator[Any]:
            for request in channel.requests():
                with stopwatch() as found:
                    for _ in range(request["steps"]):
                        yield self._input(*next(batches))
                    # Asked for one more batch, it has dispatched the last step, which may not have ended.
                    jax.block_until_ready((nnx.state(self.trainer.model), nnx.state(self.trainer.optimizer)))
                channel.say(found)

        with self.mesh:
            self.trainer.train(feed())

    def _model(self, sizes: Sizes, seed: int) -> Any:
        import jax
        from flax import nnx
        from tunix.models.llama3 import model as llama

        config = llama.ModelConfig(
            num_layers=sizes.layers,
            vocab_size=self.work.vocab,
            embed_dim=sizes.width,
            hidden_dim=sizes.mlp,
            num_heads=sizes.heads,
            head_dim=sizes.head_dim,
            num_kv_heads=sizes.kv_heads,
            rope_theta=10000,
            norm_eps=1e-5,
            weight_tying=True,
        )

        @nnx.jit
        def make() -> Any:
            model = llama.Llama3(config, rngs=nnx.Rngs(params=seed))
            state = nnx.state(model)
            nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
            return model

        with self.mesh:
            return make()

    def _input(self, tokens: Any, mask: Any) -> Any:
        import jax
        import numpy as np

        rows = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(DATA))
        tokens, mask = jax.device_put((tokens, mask.astype(np.int32)), rows)
        return self.input_type(input_tokens=tokens, input_mask=mask)

    def _constrain(self, x: Any, spec: Any) -> Any:
        import jax

        at = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(x, at)


if __name__ == "__main__":
    main()
