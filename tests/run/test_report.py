"""The report: its numbers are those of the files, no file can write markup, and no damage keeps it from being made."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from spmd_distill.cli import main
from spmd_distill.report import page, read_run
from spmd_distill.report.charts import MOST_POINTS, number, smoothed, thinned, ticks


def make_run(folder: Path, steps: int = 60, rate: float = 1e-3, kl: float = 2.0) -> Path:
    """A run folder as a finished run leaves it, with numbers made up."""
    folder.mkdir(parents=True)
    settings = {"run": str(folder), "steps": steps, "optimizer": {"learning_rate": rate}, "data": {"train": ["text"]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    lines = []
    for step in range(steps + 1):
        now = kl / (1 + step / 10)
        values = {"loss": now, "kl": now, "ce_student": now + 1, "ce_teacher": 1.0, "top1": 0.5, "acceptance": 0.25}
        if step:
            lines.append({"step": step, "split": "train", "seconds": step, **values, "grad_norm": now, "tokens": step})
        if step % 20 == 0:
            lines.append({"step": step, "split": "eval", "seconds": step, **values})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"mesh": "single", "objective": ["forward_kl"], "steps": steps}))
    (folder / "environment.json").write_text(json.dumps({"jax": "1.2.3"}))
    (folder / "samples.json").write_text(json.dumps([{"prompt": "to be", "teacher": "or not", "student": "or so"}]))
    (folder / "checkpoints" / "60").mkdir(parents=True)
    manifest = {"files": {"a": {"bytes": 3 * 2**20}}}
    (folder / "checkpoints" / "60" / "manifest.json").write_text(json.dumps(manifest))
    return folder


class Page(HTMLParser):
    """Tables as lists of rows, curves by their class, and all text and links."""

    def __init__(self, text: str):
        super().__init__()
        self.tables, self.curves, self.links, self.text, self._open = [], [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "srcset")]
        if tag == "polyline":
            self.curves.append((named["class"], len(named["points"].split())))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if any(tag in self._open for tag in ("style", "script")):
            return
        self.text += data
        if any(tag in ("td", "th") for tag in self._open):
            self.tables[-1][-1][-1] += data


def test_numbers_are_those_of_the_files(tmp_path):
    found = Page(page([read_run(make_run(tmp_path / "one"))]))
    rows = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in found.tables[0]}
    assert rows["KL to the teacher (nats/token)"] == ["2.0000", f"{2 / 7:.4f}"]
    assert rows["Perplexity"] == ["20.09", number(2.718281828 ** (2 / 7 + 1))]
    assert rows["Top-1 agreement"] == ["50.0 %", "50.0 %"]
    took = {row[0].strip(): row[1].strip() for row in found.tables[1]}
    assert (took["Steps"], took["Tokens"], took["Time"]) == ("60", "60", "0:01:00")
    assert "step 60 (3.0 MiB)" in found.text and "or so" in found.text and "1.2.3" in found.text
    assert found.curves[:3] == [("train faint", 60), ("smooth", 60), ("held", 4)]


def test_runs_side_by_side(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", rate=5e-4, kl=3.0)]
    text = page([read_run(run) for run in runs])
    found = Page(text)
    assert [cell.strip() for cell in found.tables[2][1]] == ["optimizer.learning_rate", "0.001", "0.0005"]
    assert len(found.tables[2]) == 2  # the run folders differ too, and are no setting
    assert re.findall(r'class="after( best)?">([\d.]+)<', text)[:2] == [(" best", f"{2 / 7:.4f}"), ("", f"{3 / 7:.4f}")]
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert data["runs"] == ["a", "b"] and len(data["series"]["kl"][1]["train"]) == 60


def test_what_files_say_is_text(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    run = make_run(tmp_path / "a<b>")
    sample = {"step": 1, "prompt": evil, "teacher": evil, "student": evil}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    event = {"step": 1, "seconds": 1, "guard": evil, "message": evil, "values": {evil: 1.0}}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    (run / "environment.json").write_text(json.dumps({evil: evil}))
    text = page([read_run(run), read_run(make_run(tmp_path / "c"))])
    assert text.count("<script") == 2 and "<img" not in text and "a<b>" not in text
    assert Page(text).text.count(evil) >= 7


def test_nothing_is_fetched(tmp_path):
    text = page([read_run(make_run(tmp_path / "one"))])
    assert not Page(text).links
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "url(" not in text and "@import" not in text


def test_long_runs_make_small_pages(tmp_path):
    text = page([read_run(make_run(tmp_path / "long", steps=5000))])
    assert len(text) < 250_000
    assert max(count for kind, count in Page(text).curves if kind != "held") == MOST_POINTS


DAMAGE = {
    "no config": (lambda run: (run / "config.yaml").unlink(), "config.yaml is missing"),
    "config is no YAML": (lambda run: (run / "config.yaml").write_text("a: ["), "config.yaml cannot be read"),
    "config is a list": (lambda run: (run / "config.yaml").write_text("- a"), "config.yaml holds no settings"),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl holds no line"),
    "a broken line": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n' + (run / "metrics.jsonl").read_text()),
        "metrics.jsonl, line 1",
    ),
    "summary": (lambda run: (run / "summary.json").write_text("{"), "summary.json cannot be read"),
    "samples": (lambda run: (run / "samples.json").write_text("{}"), "samples.json holds something else"),
    "events": (lambda run: (run / "events.jsonl").write_bytes(b"\xff\xfe\n3\n"), "events.jsonl, line 1"),
    "no environment": (lambda run: (run / "environment.json").unlink(), "environment.json is missing"),
    "manifest": (lambda run: (run / "checkpoints/60/manifest.json").write_text("[]"), "checkpoints/60 has no readable"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_said_and_the_page_is_made(tmp_path, case):
    run = make_run(tmp_path / "run")
    damage, said = DAMAGE[case]
    damage(run)
    assert said in Page(page([read_run(run)])).text


def test_runs_that_are_not_finished(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "summary.json").unlink()
    cut = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(cut[: len(cut) // 2])  # in the midst of a line
    found = Page(page([read_run(run)])).text
    assert re.search(r"at step \d+ of 60", found) and "spmd-distill train --resume" in found


def test_the_command_starts_no_jax(tmp_path):
    run = make_run(tmp_path / "run")
    code = f"import sys; from spmd_distill.cli import main; main(['report', {str(run)!r}]); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_mistakes_are_sentences(tmp_path, capsys):
    for arguments, said in (
        (["report", str(tmp_path)], "has neither config.yaml nor metrics.jsonl"),
        (["report", str(tmp_path / "absent")], "is no folder"),
        (["report", str(make_run(tmp_path / "run")), "--out", str(tmp_path / "no" / "x.html")], "cannot be written"),
    ):
        assert main(arguments) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_ticks_thinning_and_smoothing():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10] and ticks(-0.1, 0.31, 4) == [0, 0.2]
    assert ticks(1, 1) == [1]
    curve = [(float(i), float(i % 2)) for i in range(1000)]
    assert len(thinned(curve)) == MOST_POINTS and sum(y for _, y in thinned(curve)) == pytest.approx(MOST_POINTS / 2)
    assert thinned(curve[:10]) == curve[:10]
    assert all(abs(y - 0.5) < 0.05 for _, y in smoothed(curve)[50:-50])
    assert [number(x) for x in (0, 1234, 12345, 1.5e6, 0.0001, 0.5)] == ["0", "1,234", "12.3k", "1.5M", "0.0001", "0.5"]
