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
from spmd_distill.metrics.table import perplexity
from spmd_distill.report import MARK, page, read_run, read_runs
from spmd_distill.report.series import PIECES, log_ticks, number, smoothed, thinned, ticks


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
    (folder / "checkpoints" / "60" / "a").write_bytes(b"x" * 3072)
    manifest = {"files": {"a": {"bytes": 3072}}}
    (folder / "checkpoints" / "60" / "manifest.json").write_text(json.dumps(manifest))
    return folder


class Page(HTMLParser):
    """Tables as lists of rows, the curves of each panel by their class, and all text and links."""

    def __init__(self, text: str):
        super().__init__()
        self.tables, self.panels, self.links, self.text, self._open = [], [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "srcset")]
        if tag == "figure":
            self.panels.append({})
        if tag == "path" and "figure" in self._open:
            points = [part.split() for part in re.split("[ML]", named["d"])[1:]]
            if named["class"] in ("train", "train faint", "mean", "held", "dots"):
                line = [(int(x), float(y.removesuffix("h0"))) for x, y in points]
                self.panels[-1].setdefault(named["class"], []).append(line)
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
    assert rows["Perplexity"] == [f"{perplexity(3):.2f}", f"{perplexity(2 / 7 + 1):.2f}"]
    assert rows["Top-1 agreement"] == ["50.0 %", "50.0 %"]
    took = {row[0].strip(): row[1].strip() for row in found.tables[1]}
    assert (took["Steps"], took["Tokens"], took["Time"]) == ("60 of 60", "60", "0:01:00")
    settings = [[cell.strip() for cell in row] for row in found.tables[2]]
    assert settings == [["", "here", "default"], ["data.train", "[text]", "[demo]"], ["steps", "60", "100"]]
    assert [cell.strip() for cell in found.tables[3][1]] == ["60", "3 KiB", "all there, of the sizes they should have"]
    assert "or so" in found.text and "1.2.3" in found.text


def test_curves_are_those_of_the_files(tmp_path):
    run = read_run(make_run(tmp_path / "one"))
    kl = Page(page([run])).panels[0]
    lines = [line for line in run.lines if line.split == "train"]
    assert kl["train faint"] == [[(line.step, float(f"{line.values['kl']:.5g}")) for line in lines]]
    assert kl["dots"] == [[(line.step, float(f"{line.values['kl']:.5g}")) for line in run.evaluations()]]
    assert [x for x, _ in kl["mean"][0]] == [line.step for line in lines]


def test_runs_side_by_side(tmp_path):
    runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", rate=5e-4, kl=3.0)]
    text = page(read_runs(runs))
    found = Page(text)
    assert "<title>a/run · b/run</title>" in text
    rows = [[cell.strip() for cell in row] for row in found.tables[2]]
    # the run folders differ too, and are no setting
    assert rows == [["", "a/run", "b/run", "default"], ["optimizer.learning_rate", "0.001", "0.0005", "0.001"]]
    assert re.findall(r'class="after( best)?">([\d.]+)<', text)[:2] == [(" best", f"{2 / 7:.4f}"), ("", f"{3 / 7:.4f}")]
    assert [len(line) for line in found.panels[0]["train faint"]] == [60, 60]


def test_sets_clips_and_skipped_steps(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text("{steps: 60, optimizer: {clip_norm: 1.0}}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in list(lines):
        if line["split"] == "eval":
            lines.append({**line, "set": "code", "kl": 9.0})
        elif line["step"] == 30:
            line |= {"loss": None, "grad_norm": None, "nonfinite": {"loss": "nan", "grad_norm": "inf"}}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    event = {"step": 40, "seconds": 1.0, "guard": "resumed", "message": "went on", "values": {}}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    found = read_run(run)
    assert found.marks() == {30: ("loss is nan; grad_norm is inf", False), 40: ("went on", True)}
    text = page([found])
    parsed = Page(text)
    assert [line[-1] for line in parsed.panels[0]["dots"]] == [(60, float(f"{2 / 7:.5g}")), (60, 9.0)]
    assert len(parsed.panels[-1]["train faint"][0]) == 59  # of the gradient norms; the infinite one has no place
    assert text.count('class="mark run-0"') == text.count('class="mark quiet run-0"') == 2
    assert text.count("<title>step 30: loss is nan; grad_norm is inf</title>") == 2
    assert ">clipped</text>" in text and 'data-hide="set-0"' in text
    both = page([found, found])
    assert "KL to the teacher, code" in both and 'data-hide="set-0"' not in both


def test_what_files_say_is_text(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    run = make_run(tmp_path / "a<b>")
    sample = {"step": 1, "prompt": evil, "teacher": evil, "student": evil}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    event = {"step": 1, "seconds": 1, "guard": evil, "message": evil, "values": {evil: 1.0}}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    (run / "environment.json").write_text(json.dumps({evil: evil}))
    text = page([read_run(run), read_run(make_run(tmp_path / "c"))])
    assert text.count("<script") == 1 and "<img" not in text and "a<b>" not in text
    assert Page(text).text.count(evil) >= 7


def test_nothing_is_fetched(tmp_path):
    text = page([read_run(make_run(tmp_path / "one"))])
    assert not Page(text).links
    assert set(re.findall(r"\w+://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text  # and the browser sees to it


def test_long_runs_make_small_pages(tmp_path):
    runs = [make_run(tmp_path / str(i), steps=3000) for i in range(4)]
    text = page([read_run(runs[0])])
    assert len(text) < 200_000
    (curve,) = Page(text).panels[0]["train faint"]
    assert PIECES < len(curve) <= 2 * PIECES + 2 and curve[0][0] == 1 and curve[-1][0] == 3000
    assert len(page(read_runs(runs))) < 500_000


ODD = [('"1"', '"train"', 1), (1, '"test"', 1), (1, '"eval"', '"x"'), (10**30, '"train"', 1), (1, '"train"', "NaN")]
DAMAGE = {
    "no config": (lambda run: (run / "config.yaml").unlink(), "config.yaml is missing"),
    "config is no YAML": (lambda run: (run / "config.yaml").write_text("a: ["), "config.yaml cannot be read"),
    "config is a list": (lambda run: (run / "config.yaml").write_text("- a"), "config.yaml holds no settings"),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl holds no line"),
    "a broken line": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n' + (run / "metrics.jsonl").read_text()),
        "metrics.jsonl: 1 line is no metrics and left out; line 1: expected",
    ),
    "summary": (lambda run: (run / "summary.json").write_text("{"), "summary.json cannot be read"),
    "samples": (lambda run: (run / "samples.json").write_text("{}"), "samples.json holds something else"),
    "odd lines": (
        lambda run: (run / "metrics.jsonl").write_text(
            "".join(
                f'{{"step": {step}, "split": {split}, "seconds": {seconds}, "kl": 1}}\n' for step, split, seconds in ODD
            )
        ),
        "5 lines are no metrics and left out; first line 1: expected a JSON object with step",
    ),
    "a checkpoint's file": (
        lambda run: (run / "checkpoints/60/a").write_bytes(b""),
        "a has 0 bytes, expected 3,072; a resumed run passes it by",
    ),
    "an unfinished checkpoint": (
        lambda run: (run / "checkpoints/60/manifest.json").unlink(),
        "it has no manifest.json, so it was never finished",
    ),
    "events": (lambda run: (run / "events.jsonl").write_bytes(b"\xff\xfe\n3\n"), "events.jsonl, line 1"),
    "no environment": (lambda run: (run / "environment.json").unlink(), "environment.json is missing"),
    "manifest": (
        lambda run: (run / "checkpoints/60/manifest.json").write_text("[]"),
        "checkpoints/60 is damaged: its manifest.json cannot be read",
    ),
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
    run = make_run(tmp_path / "run")
    (tmp_path / "notes.html").write_text("mine")
    for arguments, said in (
        ([str(tmp_path)], "has neither config.yaml nor metrics.jsonl"),
        ([str(run), str(tmp_path / "absent")], "is no folder"),
        (["\0"], "expected the folder of a run"),
        ([str(run), "--out", str(tmp_path / "no" / "x.html")], "cannot be written"),
        ([str(run), "--out", str(tmp_path)], "cannot be written: Is a directory"),
        ([str(run), "--out", str(tmp_path / "notes.html")], "is there already, and is no report"),
    ):
        assert main(["report", *arguments]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "notes.html").read_text() == "mine"
    for _ in range(2):  # a report is written anew
        assert main(["report", str(run), "--out", str(tmp_path / "x.html")]) == 0
    assert MARK in (tmp_path / "x.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.html", "run", "x.html"]


def test_ticks_thinning_and_smoothing():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10] and ticks(-0.1, 0.31, 4) == [0, 0.2]
    assert ticks(1, 1) == [1]
    assert log_ticks(0.03, 2) == [0.05, 0.1, 0.2, 0.5, 1, 2] and log_ticks(1e-6, 1) == [10.0**e for e in range(-6, 1)]
    curve = [(i, float(i % 7)) for i in range(5000)]
    curve[1234] = (1234, 99.0)
    thin = thinned(curve)
    assert set(thin) <= set(curve) and len(thin) <= 2 * PIECES + 2
    assert (thin[0], thin[-1], max(y for _, y in thin), min(y for _, y in thin)) == (curve[0], curve[-1], 99.0, 0.0)
    assert thinned(curve[:10]) == curve[:10]
    smooth = smoothed(curve)
    assert len(smooth) <= PIECES + 2 and smooth[0] == curve[0] and smooth[-1][0] == 4999
    assert all(abs(y - 3) < 0.2 for x, y in smooth if x > 200 and abs(x - 1234) > 100)
    assert [number(x) for x in (0, 1234, 12345, 1.5e6, 0.0001, 0.000462, 0.5)] == [
        "0", "1,234", "12.35k", "1.5M", "1e-4", "4.62e-4", "0.5"
    ]  # fmt: skip
