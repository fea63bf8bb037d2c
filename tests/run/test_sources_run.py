"""A run over a mixture of records: named held-out sets in its metrics, killed and resumed bit for bit."""

import json

import numpy as np
import pytest
from rich.console import Console
from tiny import tiny_run, train_until_first_checkpoint

from spmd_distill.config import parse_config
from spmd_distill.errors import UserError
from spmd_distill.metrics import CLOCKED, read_metrics
from spmd_distill.train import distil


def flags(folder) -> list[str]:
    for number, name in enumerate(("sums", "words")):
        lines = []
        for i in range(60):
            random = np.random.default_rng(100 * number + i)
            a, b = random.integers(0, 50, 2)
            pair = (
                (f"{a}+{b}=", str(a + b)) if name == "sums" else ("to be ", " ".join(random.choice(["or", "not"], 4)))
            )
            lines.append(json.dumps(dict(zip(("prompt", "completion"), pair, strict=True))) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    sources = f"[{folder / 'sums.jsonl'}, {{path: {folder / 'words.jsonl'}, weight: 2}}]"
    return ["--data.train", sources, "--data.loss", "completion", "--data.length", "32", "--mesh", "single",
            "--mapper", "vmap", "--data.seed", "5"]  # fmt: skip


def traced(folder) -> list:
    return [(m.step, m.split, {k: v for k, v in m.values.items() if k not in CLOCKED}) for m in read_metrics(folder)]


def test_a_mixture_of_records_is_scored_by_source_and_resumed_bit_for_bit(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    distil(tiny_run(whole, *flags(whole)), console=Console(quiet=True))
    lines = read_metrics(whole / "run")
    found = {(line.step, line.set): line.values["ce_student"] for line in lines if line.split == "eval"}
    assert {name for _, name in found} == {None, "sums", "words"}
    for step, name in found:
        parts = [found[step, which] for which in ("sums", "words")]
        assert name is not None or min(parts) < found[step, None] < max(parts)
    waits = [line.values["data_wait"] for line in lines if line.split == "train" and line.step > 1]
    assert waits and all(0 <= share <= 1 for share in waits)
    train_until_first_checkpoint(tiny_run(killed, *flags(killed)))
    config = parse_config(path=killed / "run" / "config.yaml")
    distil(config, resume=True, console=Console(quiet=True))
    assert traced(killed / "run") == traced(whole / "run")
    other = parse_config(["--data.seed", "6"], killed / "run" / "config.yaml")
    with pytest.raises(UserError, match=r"data\.seed: 5 -> 6"):
        distil(other, resume=True, console=Console(quiet=True))
