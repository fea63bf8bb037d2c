"""Whole runs with everything around the optimizer on: they go on bit for bit, and keep and score the average."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from tiny import tiny_run, train_until_first_checkpoint

from spmd_distill.checkpoint import Checkpoints
from spmd_distill.errors import UserError
from spmd_distill.runs import evaluate_run, open_run
from spmd_distill.train import distil

EVERYTHING = (
    "--optimizer.name", "adamw", "--optimizer.state", "int8", "--optimizer.ema", "0.9", "--optimizer.offload", "true",
    "--optimizer.shard_state", "true", "--optimizer.freeze", "[layers.mlp.down]", "--optimizer.schedule", "wsd",
    "--precision.loss_scale", "dynamic", "--precision.loss_scale_window", "2", "--precision.gradients", "bfloat16",
    "--precision.compute", "float16",
)  # fmt: skip


def values(folder: Path, split: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if "second" not in k and k != "data_wait"}
        for line in lines
        if line["split"] == split
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, and one that was broken off after its first checkpoint and went on."""
    whole, broken = (tmp_path_factory.mktemp(name) for name in ("whole", "broken"))
    quiet = Console(quiet=True)
    distil(tiny_run(whole, *EVERYTHING), console=quiet)
    config = tiny_run(broken, *EVERYTHING)
    train_until_first_checkpoint(config)
    distil(config, resume=True, console=quiet)
    return whole / "run", broken / "run"


def test_a_run_with_everything_on_goes_on_bit_for_bit(runs):
    traces = [values(run, "train") for run in runs]
    assert len(traces[0]) == 6 and traces[0] == traces[1]
    scales = [v["loss_scale"] for v in traces[0]]
    assert scales == [2.0 ** (15 + n // 2) for n in range(6)]
    states = []
    for run in runs:
        opened = open_run(run)
        with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
            like = opened.setup.run.abstract_state(opened.setup.tx)
            where = opened.setup.run.state_shardings(opened.setup.tx)
            like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, where)
            states.append(checkpoints.restore(like=like)[0])
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, states))
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves((states[0].opt_state, states[0].ema))}
    assert kinds == {"pinned_host"}
    assert any(x.dtype == np.int8 for x in jax.tree.leaves(states[0].opt_state))


def test_what_is_scored_and_exported_is_the_average(runs):
    opened = open_run(runs[0])
    exported = load_file(runs[0] / "student" / "model.safetensors")["model.embed_tokens.weight"]
    ours = np.asarray(opened.params["embed"])[: len(exported)]
    np.testing.assert_array_equal(ours, exported)
    last = values(runs[0], "eval")[-1]
    assert evaluate_run(opened)["kl"] == pytest.approx(last["kl"], rel=1e-6)


def test_a_checkpoint_of_another_optimizer_is_refused_by_its_leaves(runs):
    with pytest.raises(UserError, match=r"does not fit this run: .*ema.*found .*, expected nothing"):
        open_run(runs[0], settings=["--optimizer.ema", "null"])
