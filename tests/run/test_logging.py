"""What a run writes while it trains: pooled lines, samples, what was compiled; Weights & Biases, there or broken."""

import json
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from tiny import tiny_run

from spmd_distill.config import WandbConfig
from spmd_distill.errors import UserError
from spmd_distill.loop import Loop
from spmd_distill.metrics import CLOCKED, Wandb, check_wandb, read_metrics
from spmd_distill.train import distil

QUIET = Console(quiet=True)
SINGLE = ("--mesh", "single", "--steps", "6", "--eval.every", "4", "--checkpoint.every", "5")


def train_lines(run):
    return [line for line in read_metrics(run) if line.split == "train"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with a line a step, and one whose steps are looked at late and pooled to lines of three."""
    plain, pooled = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("pooled")
    summaries = [distil(tiny_run(plain, *SINGLE, "--logging.peak_tflops", "0.5"), console=QUIET)]
    with pytest.MonkeyPatch.context() as patched:
        train = Loop._train

        def as_on_an_accelerator(loop, *args):
            loop.on_cpu = False  # safe on one device, whose programs run one after another
            return train(loop, *args)

        patched.setattr(Loop, "_train", as_on_an_accelerator)
        settings = ("--logging.every", "3", "--eval.samples_every", "2")
        summaries.append(distil(tiny_run(pooled, *SINGLE, *settings), console=QUIET))
    return plain / "run", pooled / "run", summaries


def test_late_and_pooled_lines_are_averages_of_the_very_same_steps(runs):
    plain, pooled, summaries = runs
    steps, lines = train_lines(plain), train_lines(pooled)
    assert [line.step for line in lines] == [3, 4, 5, 6]  # the evaluation and the checkpoint end a line early
    tokens = {line.step: line.values["tokens"] for line in steps} | {0: 0}
    first = 1
    for line in lines:
        own = [step for step in steps if first <= step.step <= line.step]
        weights = [tokens[step.step] - tokens[step.step - 1] for step in own]
        for name in ("loss", "kl", "ce_student"):
            mean = sum(w * step.values[name] for w, step in zip(weights, own, strict=True)) / sum(weights)
            assert line.values[name] == pytest.approx(mean, rel=1e-6)
        for name in ("grad_norm", "clipped"):
            assert line.values[name] == pytest.approx(sum(step.values[name] for step in own) / len(own), rel=1e-6)
        assert line.values["learning_rate"] == own[-1].values["learning_rate"]
        assert line.values["tokens"] == own[-1].values["tokens"]
        assert line.values["clipped_total"] == own[-1].values["clipped_total"]
        first = line.step + 1
    same = ("kl_after", "student_ppl_after", "tokens", "guards")
    assert [summaries[0][name] for name in same] == [summaries[1][name] for name in same]


def test_rates_and_utilisation(runs):
    plain, pooled, summaries = runs
    first, *rest = train_lines(plain)
    assert not first.values.keys() & set(CLOCKED), "the first step warms up"
    flops = json.loads((plain / "compiled.json").read_text())["flops_per_step"]["counted"]
    for line in rest:
        values = line.values
        assert values["mfu"] == pytest.approx(values["flops_per_second"] / 0.5e12)
        steps_a_second = values["flops_per_second"] / flops
        before = next(other for other in [first, *rest] if other.step == line.step - 1)
        tokens = values["tokens"] - before.values["tokens"]
        assert values["tokens_per_second"] == pytest.approx(steps_a_second * tokens)
        assert 0 <= values["data_wait"] <= 1
    assert all("mfu" not in line.values for line in train_lines(pooled)), "nobody knows what a CPU can do"
    assert all(summary["tokens_per_second"] > 0 for summary in summaries)


def test_samples_are_continued_at_evaluations(runs):
    plain, pooled, _ = runs
    for run, steps in ((plain, [0, 4, 6]), (pooled, [0, 6])):
        found = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
        assert [(x["step"], x["prompt"]) for x in found] == [(step, p) for step in steps for p in ("to be", "or")]
        assert len({(x["prompt"], x["teacher"]) for x in found}) == 2, "the teacher says the same every time"
        last = [{k: v for k, v in x.items() if k != "step"} for x in found[-2:]]
        assert last == json.loads((run / "samples.json").read_text())


def test_what_was_compiled_is_written_down(runs):
    found = json.loads((runs[0] / "compiled.json").read_text())
    assert found["mapper"] == "shard_map" and found["layout"]["name"] == "single" and found["devices"] == 1
    assert found["head"]["kind"] == "fused" and found["head"]["chunk"] > 0
    assert found["dtypes"]["optimizer"] and found["bytes_per_device"]["total"] > 0 and found["compile_seconds"] > 0
    assert found["flops_per_step"]["counted"] == pytest.approx(found["flops_per_step"]["formula"], rel=0.15)


class FakeWandb(SimpleNamespace):
    """As much of the package as a run uses; ``breaks`` names the call that fails."""

    def __init__(self, breaks=None):
        super().__init__(logged=[], begun=[], finished=0, breaks=breaks, id="abc", Html=lambda text: text)

    def fail(self, call):
        if self.breaks == call:
            raise ConnectionError("no network")

    def init(self, **settings):
        self.fail("init")
        self.begun.append(settings)
        return self

    def define_metric(self, *args, **settings):
        pass

    def log(self, values):
        self.fail("log")
        self.logged.append(values)

    def finish(self):
        self.fail("finish")
        self.finished += 1


@pytest.mark.parametrize("breaks", [None, "init", "log", "finish"])
def test_weights_and_biases_goes_on_after_a_resume_and_never_ends_a_run(tmp_path, monkeypatch, breaks):
    fake, said = FakeWandb(breaks), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = WandbConfig(project="p")
    check_wandb(config)
    for resume in (False, True):
        sink = Wandb(config, tmp_path, {"steps": 3}, resume, said.append)
        sink.write(1, {"train/loss": 2.0})
        sink.text(1, {"samples/0": "a < b"})
        sink.close()
        sink.close()
    if breaks:
        assert len(said) == 2 and all("ConnectionError: no network" in line for line in said)
        return
    assert not said and fake.finished == 2
    assert [x["id"] for x in fake.begun] == [None, "abc"] and fake.begun[0]["project"] == "p"
    assert fake.logged[:2] == [{"step": 1, "train/loss": 2.0}, {"step": 1, "samples/0": "<pre>a &lt; b</pre>"}]


def test_weights_and_biases_that_is_not_installed_is_said_before_anything_begins(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install wandb"):
        distil(tiny_run(tmp_path, "--logging.wandb.project", "p"), console=QUIET)
    assert not (tmp_path / "run").exists()
