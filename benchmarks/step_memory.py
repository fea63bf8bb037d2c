"""Exact memory of the demo's training step, per device, for each remat policy.

``python benchmarks/step_memory.py [--mesh NAME] [--json]`` compiles the step and runs nothing; it prints a table, or
with --json one row a figure.
"""

import argparse
import json
from dataclasses import replace

from spmd_distill.config import RunConfig
from spmd_distill.runtime import devices_of, prepare_jax


def measure(config: RunConfig) -> dict[str, float]:
    """Bytes a device: arguments (state, teacher, batch), temporaries, and outputs written in place."""
    import jax
    import jax.numpy as jnp

    from spmd_distill.build import set_up
    from spmd_distill.state import abstract_state
    from spmd_distill.types import Batch

    setup = set_up(config)
    run, teacher = setup.run, setup.run.teacher.model

    def described(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree.map(described, teacher.abstract, run.mapper.shardings(teacher.specs(run.mapper.layout)))
    shape = (config.data.micro_batches, config.data.rows, config.data.length)
    types = (jnp.int32, jnp.int32, jnp.bool_, jnp.int32, jnp.int32)
    shardings = jax.tree.leaves(run.mapper.shardings(run.batch_specs(1)))
    batch = Batch(*(jax.ShapeDtypeStruct(shape, t, sharding=s) for t, s in zip(types, shardings, strict=True)))
    compiled = run.train_step(setup.tx).lower(abstract_state(run, setup.tx), params, batch).compile()
    memory = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "in place": memory.alias_size_in_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="dp2_tp4")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prepare_jax(devices_of(options.mesh))
    from spmd_distill.cli.demo import demo_config

    rows = []
    for remat in ("none", "dots", "full"):
        config = demo_config("unused", mesh=options.mesh)
        found = measure(replace(config, student=replace(config.student, remat=remat)))
        for metric, value in found.items():
            setting = {"mesh": options.mesh, "remat": remat}
            rows.append(
                {
                    "benchmark": "step_memory",
                    "library": "spmd_distill",
                    "setting": setting,
                    "metric": metric,
                    "value": value,
                    "unit": "bytes a device",
                }
            )
        if not options.json:
            print(f"remat {remat:5}", *(f"{name} {value / 2**20:7.1f} MiB" for name, value in found.items()), sep="  ")
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
