"""Metrics: what was written can be read back, a resumed run leaves one trace, the picture is always drawn."""

import io
import json
import math
import sys

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import RecordWriter

from spmd_distill.errors import UserError
from spmd_distill.metrics import MetricWriter, perplexity, plot_curves, read_metrics, results_table

ALL = {
    "loss": 1.5,
    "kl": 0.5,
    "ce_student": 3.5,
    "ce_teacher": 3.0,
    "top1": 0.7,
    "acceptance": 0.75,
    "learning_rate": 1e-4,
    "grad_norm": 2.0,
    "tokens": 4096.0,
    "tokens_per_second": 1234.5,
}


def board(folder):
    """(tag, step, value) of every scalar, and the steps from which a resumed run purged."""
    scalars, purged = [], []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            if event.HasField("session_log"):
                purged.append(event.step)
            scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return scalars, purged


def test_lines_and_scalars(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, ALL, "train")
        text = (tmp_path / "metrics.jsonl").read_text()  # flushed before the file is closed
        writer.write(2, {"kl": np.float32(0.1), "top1": jnp.float32(0.5)}, "eval")
    first = json.loads(text)
    seconds = first.pop("seconds")
    assert 0 <= seconds < 60
    assert first == {"step": 1, "split": "train", **ALL}
    lines = read_metrics(tmp_path)
    assert [(line.step, line.split) for line in lines] == [(1, "train"), (2, "eval")]
    assert lines[0].values == ALL
    assert lines[1].values == {"kl": float(np.float32(0.1)), "top1": 0.5}  # to the last bit
    scalars, purged = board(tmp_path)
    assert purged == []
    assert {tag for tag, *_ in scalars} == {f"train/{name}" for name in ALL} | {"eval/kl", "eval/top1"}
    assert ("train/kl", 1, 0.5) in scalars and ("eval/kl", 2, np.float32(0.1)) in scalars


def test_what_is_no_finite_number_stays_json(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"loss": math.nan, "kl": math.inf, "grad_norm": -math.inf, "top1": 0.5}, "train")
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert [line[k] for k in ("loss", "kl", "grad_norm", "top1")] == [None, None, None, 0.5]
    assert line["nonfinite"] == {"loss": "nan", "kl": "inf", "grad_norm": "-inf"}
    values = read_metrics(tmp_path)[0].values
    assert math.isnan(values["loss"]) and values["kl"] == math.inf and values["grad_norm"] == -math.inf


def test_a_resumed_run_leaves_the_trace_of_one_run(tmp_path):
    def steps(writer, *numbers):
        for step in numbers:
            writer.write(step, {"loss": 1.0 / step}, "train")
            if step % 2 == 0:
                writer.write(step, {"kl": 1.0 / step}, "eval")

    with MetricWriter(tmp_path) as writer:
        writer._start -= 100  # it began 100 seconds ago
        steps(writer, 1, 2, 3, 4, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "split": "tr')  # killed while writing
    with MetricWriter(tmp_path, resume_from=3) as writer:
        steps(writer, 4, 5, 6)
    resumed = read_metrics(tmp_path)
    (tmp_path / "whole").mkdir()
    with MetricWriter(tmp_path / "whole") as writer:
        steps(writer, 1, 2, 3, 4, 5, 6)
    whole = read_metrics(tmp_path / "whole")
    assert [(x.step, x.split, x.values) for x in resumed] == [(x.step, x.split, x.values) for x in whole]
    seconds = [line.seconds for line in resumed]
    assert seconds == sorted(seconds) and seconds[0] >= 100
    assert not (tmp_path / "metrics.tmp").exists()
    scalars, purged = board(tmp_path)
    assert purged == [4]
    assert len([step for tag, step, _ in scalars if tag == "train/loss" and step == 5]) == 2


def test_resuming_before_anything_was_written(tmp_path):
    with MetricWriter(tmp_path, resume_from=0) as writer:
        writer.write(1, ALL, "train")
    assert [line.step for line in read_metrics(tmp_path)] == [1]


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, ALL, "train")
    with pytest.raises(UserError, match=r"metrics\.jsonl: found the metrics of an earlier run"):
        MetricWriter(tmp_path)


def test_unwritable(tmp_path):
    with pytest.raises(UserError, match=r"none/metrics\.jsonl: cannot write: No such file"):
        MetricWriter(tmp_path / "none")
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(UserError, match="cannot write: File exists"):
        MetricWriter(tmp_path)
    (tmp_path / "curves.png").mkdir()
    with pytest.raises(UserError, match=r"curves\.png: cannot write"):
        plot_curves(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("full", ["metrics.jsonl", "tensorboard"])
def test_full_disk_neither_hangs_nor_hides_the_cause(tmp_path, caplog, full):
    def fail(writer):
        for step in range(2, 5000):
            writer.write(step, ALL, "train")

    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot write: No space left"):  # noqa: SIM117
        with MetricWriter(tmp_path) as writer:
            writer.write(1, ALL, "train")
            if full == "tensorboard":
                writer._sinks[0].close()
                writer._sinks[0]._records = RecordWriter("/dev/full")
            else:
                writer._file.close()
                writer._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
            fail(writer)
    assert ("events were lost" in caplog.text) == (full == "tensorboard")
    assert read_metrics(tmp_path)[0].values == ALL


def test_a_strange_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "seconds": 1.0, "kl": 1.0}\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: expected .* found '\{\"step\": 2\}"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("hello\n")
    with pytest.raises(UserError, match="line 1"):
        plot_curves(tmp_path)


def test_names_that_are_taken(tmp_path):
    with MetricWriter(tmp_path) as writer:
        with pytest.raises(AssertionError):
            writer.write(1, {"seconds": 1.0}, "train")
        with pytest.raises((AssertionError, TypeError)):  # the second where types are checked at run time
            writer.write(1, {"kl": 1.0}, "test")  # pyright: ignore


def picture(folder):
    found = matplotlib.image.imread(plot_curves(folder))
    assert found.std() > 0.01, "an empty picture"
    return found.shape[:2]


def test_picture_of_a_whole_run(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for step in range(1, 201):
            odd = {"kl": math.nan, "grad_norm": math.inf} if step == 50 else {}
            writer.write(step, {name: value / step for name, value in ALL.items()} | odd, "train")
            if step % 50 == 0:
                writer.write(step, ALL, "eval")
    height, width = picture(tmp_path)
    assert width > height > 600


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [(0, ALL, "eval")],
        [(1, {"kl": 1.0}, "train")],
        [(1, {"kl": math.nan}, "train")],
        [(5, {"ce_student": 3.0}, "eval")],
        [(1, {"ce_student": 800.0, "ce_teacher": 0.0}, "train")],
        [(1, {"unknown": 3.0}, "train")],
        [
            (1, {"loss": 1.0, "kl": 1.0}, "train"),
            (2, {"tokens_per_second": 5.0}, "train"),
            (2, {"top1": 0.5}, "eval"),
        ],
    ],
)
def test_picture_of_little(tmp_path, lines):
    with MetricWriter(tmp_path) as writer:
        for line in lines:
            writer.write(*line)
    picture(tmp_path)


def test_picture_without_a_file(tmp_path):
    picture(tmp_path)


def shown(before, after):
    out = io.StringIO()
    Console(file=out, width=100).print(results_table(before, after))
    return out.getvalue()


def test_results_table():
    before = {
        "kl": 1.25,
        "ce_student": math.log(50),
        "ce_teacher": math.log(20),
        "top1": 0.5,
        "acceptance": 0.6,
    }
    after = {
        "kl": 0.5,
        "ce_student": math.log(25),
        "ce_teacher": math.log(20),
        "top1": 0.625,
        "acceptance": 0.7,
    }
    text = shown(before, after)
    for row in (
        ["KL to the teacher", "1.2500", "0.5000"],
        ["perplexity (teacher 20.00)", "50.00", "25.00"],
        ["top-1 agreement", "50.0 %", "62.5 %"],
        ["acceptance", "60.0 %", "70.0 %"],
    ):
        line = next(line for line in text.splitlines() if row[0] in line)
        assert line.index(row[1]) < line.index(row[2])


def test_results_table_with_little_in_it():
    text = shown({"kl": 1.0}, {"ce_student": 1000.0})
    assert "inf" in text and " - " in text and "top-1" not in text and "teacher 2" not in text


def test_perplexity():
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))
