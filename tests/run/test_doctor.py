"""The doctor on run folders: all damage is named, nothing is changed, and its verdict is what resuming then does."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from tiny import tiny_run

from spmd_distill.cli import main
from spmd_distill.config import parse_config
from spmd_distill.doctor.run import RunReport, check_run
from spmd_distill.errors import UserError
from spmd_distill.runfolder import RunFolder
from spmd_distill.train import distil

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def home(light, tmp_path_factory) -> Path:
    """A teacher, a text and a finished run."""
    folder = tmp_path_factory.mktemp("doctor")
    distil(tiny_run(folder, "--mesh", "single"), console=QUIET)
    return folder


@pytest.fixture
def whole(home, tmp_path) -> Path:
    """A copy of the finished run."""
    shutil.copytree(home / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def killed(whole) -> Path:
    """The run as a kill after step 6 leaves it, before that step was saved."""
    shutil.rmtree(whole / "checkpoints" / "6")
    shutil.rmtree(whole / "student")
    for name in ("summary.json", "samples.json"):
        (whole / name).unlink()
    return whole


def look(run: Path) -> RunReport:
    """What the doctor says, who must not have touched anything."""
    before = fingerprint(run)
    report = check_run(run)
    assert fingerprint(run) == before
    return report


def fingerprint(folder: Path) -> dict[str, tuple]:
    """Names, contents and times of all below a folder, and of itself."""
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in [folder, *folder.rglob("*")]
    }


def said(report: RunReport, *statuses: str) -> str:
    """The findings of these statuses, one a line."""
    return "\n".join(f"{f.status}: {f.about}: {f.found} {f.fix}" for f in report.findings if f.status in statuses)


def data_file(run: Path, step: int) -> Path:
    """The largest file of a step's arrays."""
    return max((p for p in (run / f"checkpoints/{step}/state").rglob("*") if p.is_file()), key=os.path.getsize)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def cut(path: Path, part: float = 0.5) -> None:
    os.truncate(path, int(path.stat().st_size * part))


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def without_train(*steps: int) -> Callable[[list[str]], list[str]]:
    def change(all_lines: list[str]) -> list[str]:
        return [x for x in all_lines if not (json.loads(x)["step"] in steps and json.loads(x)["split"] == "train")]

    return change


def set_line(path: Path, name: str, value: str) -> None:
    """Set a setting at the top of a run file."""
    path.write_text(re.sub(rf"^{name}:.*$", f"{name}: {value}", path.read_text(), flags=re.M))


class Case(NamedTuple):
    harm: Callable[[Path], object]
    status: str
    finding: str
    """A pattern of what is said, status first."""
    step: int | None = 4
    """Where the run goes on; None: it cannot."""


DAMAGE = {
    "a bit of an array": Case(lambda r: flip(data_file(r, 4)), "problem", r"checkpoints/4: is damaged.*sha256", 2),
    "a bit of the meta": Case(lambda r: flip(r / "checkpoints/4/meta/metadata"), "problem", "meta/metadata is not", 2),
    "an array cut": Case(lambda r: cut(data_file(r, 4)), "problem", r"checkpoints/4: is damaged: state/.* bytes", 2),
    "an array deleted": Case(lambda r: data_file(r, 4).unlink(), "problem", "checkpoints/4.*is missing", 2),
    "an old step deleted half": Case(lambda r: data_file(r, 2).unlink(), "note", "checkpoints/2.*passes it by"),
    "an old step's bit": Case(lambda r: flip(data_file(r, 2)), "problem", "checkpoints/2: is damaged"),
    "no manifest": Case(lambda r: (r / "checkpoints/4/manifest.json").unlink(), "note", "4: it has no manifest", 2),
    "manifest cut": Case(lambda r: cut(r / "checkpoints/4/manifest.json"), "problem", "manifest.json cannot be", 2),
    "manifest is other JSON": Case(
        lambda r: (r / "checkpoints/4/manifest.json").write_text('{"files": {}}'), "problem", "lists no file", 2
    ),
    "every step": Case(
        lambda r: [flip(data_file(r, step)) for step in (2, 4)], "problem", "no step is good.*begin again", None
    ),
    "no step": Case(lambda r: shutil.rmtree(r / "checkpoints"), "note", "no checkpoint yet", 0),
    "checkpoints is a file": Case(
        lambda r: (shutil.rmtree(r / "checkpoints"), (r / "checkpoints").write_text("")), "problem", "is a file", None
    ),
    "a killed save": Case(
        lambda r: (r / "checkpoints/6.orbax-checkpoint-tmp/state").mkdir(parents=True), "note", "left by a save"
    ),
    "a killed write": Case(lambda r: (r / ".config.yaml.1.tmp").write_text("ste"), "note", "yaml.1.tmp: left by"),
    "metrics cut in a line": Case(
        lambda r: os.truncate(r / "metrics.jsonl", (r / "metrics.jsonl").stat().st_size - 9), "note", "was cut off"
    ),
    "metrics with a bad line": Case(
        lambda r: lines(r / "metrics.jsonl", lambda x: [*x[:2], "{}\n", *x[2:]]), "problem", "line 3: expected a", None
    ),
    "metrics that are no UTF-8": Case(
        lambda r: (r / "metrics.jsonl").write_bytes(b"\xff\xfe\n"), "problem", "line 1: is not UTF-8", None
    ),
    "metrics with a step that is text": Case(
        lambda r: lines(r / "metrics.jsonl", lambda x: [x[0].replace('"step": 0', '"step": "0"'), *x[1:]]),
        "problem", "line 1: expected", None,
    ),
    "metrics deleted": Case(lambda r: (r / "metrics.jsonl").unlink(), "problem", "is missing, though step 4"),
    "metrics end early": Case(
        lambda r: lines(r / "metrics.jsonl", without_train(4, 5, 6)), "problem", "ends at step 3, before"
    ),
    "metrics with a gap": Case(
        lambda r: lines(r / "metrics.jsonl", without_train(2)), "problem", r"no line for steps 2\."
    ),
    "metrics of two runs": Case(
        lambda r: lines(r / "metrics.jsonl", lambda x: x + x[1:3]), "problem", "step 1 comes after step 6"
    ),
    "metrics beyond the step": Case(lambda r: None, "note", "ends at step 6, the newest good checkpoint is of step 4"),
    "events with a bad line": Case(
        lambda r: append(r / "events.jsonl", '["no object"]\n'), "problem", "events.jsonl, line .*JSON object"
    ),
    "events cut": Case(lambda r: append(r / "events.jsonl", '{"step": 4'), "note", "events.jsonl: its last"),
    "events cut before it went on": Case(
        lambda r: append(r / "events.jsonl", '{"step"\n{"step": 4, "guard": "resumed"}\n'),
        "note", "cut off by a kill",
    ),
    "samples with a bad line": Case(
        lambda r: (r / "samples.jsonl").write_text("0\n"), "problem", "samples.jsonl, line 1: expected a JSON object"
    ),
    "no run file": Case(lambda r: (r / "config.yaml").unlink(), "problem", "config.yaml: is missing", None),
    "run file cut": Case(lambda r: cut(r / "config.yaml", 0.1), "problem", "config.yaml", None),
    "run file of another version": Case(
        lambda r: (
            append(r / "config.yaml", "warp: 9\n"),
            (r / "environment.json").write_text('{"spmd_distill": "9.0"}'),
        ),
        "problem", "unknown setting 'warp'.*written by spmd_distill 9.0", None,
    ),
    "run file edited": Case(
        lambda r: set_line(r / "config.yaml", "seed", "5"), "problem", "seed: is not what step 4.*0 -> 5.*another", None
    ),
    "run file edited to rounding": Case(
        lambda r: set_line(r / "config.yaml", "mesh", "dp2_tp4"), "note", "mesh: is not what.*to rounding"
    ),
    "layout gone": Case(lambda r: set_line(r / "config.yaml", "mesh", "mine.yaml"), "problem", "mesh:.*mine", None),
    "other versions": Case(
        lambda r: (r / "environment.json").write_text('{"jax": "0.4.0"}'), "note", "versions: other versions.*jax 0.4.0"
    ),
    "environment is other JSON": Case(
        lambda r: (r / "environment.json").write_text("[]"), "problem", "environment.json: holds a list"
    ),
    "environment cut": Case(lambda r: cut(r / "environment.json"), "problem", "environment.json: is no JSON"),
    "empty folder": Case(
        lambda r: (shutil.rmtree(r), r.mkdir()), "problem", "config.yaml: is missing, so this is no run", None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_verdict_says_where_the_run_goes_on(killed, name):
    case = DAMAGE[name]
    case.harm(killed)
    report = look(killed)
    found = said(report, case.status)
    assert re.search(case.finding, found), said(report, "ok", "note", "problem")
    assert (report.step if report.resumable else None) == case.step
    if case.step is None:
        assert report.command is None and "cannot be resumed: " in report.sentence
    else:
        assert report.command == f"spmd-distill train --resume {killed}" and report.command in report.sentence
    if case.status == "note":
        assert not said(report, "problem")


def test_a_whole_run_is_all_right_and_finished(whole):
    report = look(whole)
    assert not said(report, "note", "problem")
    assert not report.resumable and "is finished, with all 6 steps" in report.sentence
    assert "checkpoints: good by their sha256: 2, 4, 6" in said(report, "ok")


AFTER_THE_END = {
    "summary cut": (lambda r: cut(r / "summary.json"), "summary.json: is no JSON"),
    "weights cut": (lambda r: cut(r / "student/model.safetensors"), "model.safetensors: is not a whole safetensors"),
    "weights deleted": (lambda r: (r / "student/model.safetensors").unlink(), "student.*holds neither"),
    "config deleted": (lambda r: (r / "student/config.json").unlink(), "student/config.json: no such file"),
    "config is other JSON": (lambda r: (r / "student/config.json").write_text("3"), "holds a JSON int"),
    "tokenizer deleted": (lambda r: (r / "student/tokenizer.json").unlink(), "student.*tokenizer"),
    "student deleted": (lambda r: shutil.rmtree(r / "student"), "student.*no such folder.*spmd-distill export"),
}


@pytest.mark.parametrize("name", AFTER_THE_END)
def test_damage_to_what_a_run_leaves_is_named(whole, name):
    harm, finding = AFTER_THE_END[name]
    harm(whole)
    report = look(whole)
    assert re.search(finding, said(report, "problem")), said(report, "ok", "note", "problem")
    assert report.step == 6


def test_weights_that_are_no_numbers_are_named(whole):
    import numpy as np
    from safetensors.numpy import load_file, save_file

    weights = load_file(whole / "student/model.safetensors")
    weights["model.norm.weight"][3] = np.nan
    save_file(weights, whole / "student/model.safetensors", {"format": "pt"})
    assert "model.norm.weight holds numbers that are not finite" in said(look(whole), "problem")


def test_a_run_that_was_trained_and_not_exported_is_resumed_for_that(whole):
    for name in ("summary.json", "samples.json"):
        (whole / name).unlink()
    shutil.rmtree(whole / "student")
    report = look(whole)
    assert report.resumable and report.step == 6 and "its student is exported by: " in report.sentence


@contextlib.contextmanager
def changed(path: Path, content: bytes | None) -> Iterator[None]:
    """A file with another content, or away (None), for a while."""
    was = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(was)


SOURCES = {
    "another teacher": ("teacher/model.safetensors", lambda b: b[:-4] + b"\0\0\0\0", r"teacher.path: .* is another"),
    "no teacher": ("teacher/model.safetensors", lambda b: None, "teacher.path: .*holds neither"),
    "teacher cut": ("teacher/model.safetensors", lambda b: b[:-9], "teacher.path: .*not a whole safetensors"),
    "another tokenizer": ("teacher/tokenizer.json", lambda b: b.replace(b'"Z"', b'"ZZ"', 1), "tokenizer: is not what"),
    "another text": ("text/03.txt", lambda b: b"what is " + b, "data.train, text: its text is not"),
    "less text": ("text/03.txt", lambda b: None, "data.train, text: its text is not"),
    "text that is none": ("text/03.txt", lambda b: b"\xff\xff", "data.train: .*03.txt"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_teacher_or_a_text_that_is_not_what_it_was_is_named(home, killed, name):
    file, change, finding = SOURCES[name]
    with changed(home / file, change((home / file).read_bytes())):
        report = look(killed)
    assert re.search(finding, said(report, "problem")), said(report, "ok", "note", "problem")
    assert not report.resumable


REFUSED = {
    "metrics with a bad line": "metrics.jsonl, line 3",
    "metrics that are no UTF-8": "metrics.jsonl, line 1",
    "every step": "expected a good step to restore, found none",
    "run file edited": "seed: 0 -> 5",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_doctor_calls_not_resumable_is_refused_by_resuming(killed, name, capsys):
    DAMAGE[name].harm(killed)
    assert not check_run(killed).resumable
    assert main(["train", "--resume", str(killed)]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert REFUSED[name] in printed and "Traceback" not in printed


@pytest.mark.parametrize("name", ["a bit of an array", "metrics cut in a line"])
def test_what_the_doctor_calls_resumable_goes_on_from_the_step_it_says(killed, name):
    DAMAGE[name].harm(killed)
    report = check_run(killed)
    distil(parse_config(["--run", str(killed)], killed / "config.yaml"), resume=True, console=QUIET)
    went_on = json.loads((killed / "resumed.jsonl").read_text().splitlines()[-1])["step"]
    assert report.resumable and report.step == went_on == DAMAGE[name].step
    after = look(killed)
    assert not said(after, "problem") and "is finished" in after.sentence


def test_a_run_that_is_alive_is_left_alone(killed):
    (killed / "checkpoints/6.orbax-checkpoint-tmp").mkdir()
    with RunFolder(killed).lock():
        report = look(killed)
    assert "a process is training in it" in said(report, "note") and not said(report, "problem")
    assert "ok: checkpoints/6.orbax-checkpoint-tmp: a step that is being saved" in said(report, "ok")
    assert not report.resumable and report.command is None and "is being trained" in report.sentence
    with RunFolder(killed).lock():
        pass  # asking let go of it


def test_a_disk_without_room_for_two_checkpoints(killed, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 500_000))
    report = look(killed)
    assert re.search("disk: 488 KiB free, a checkpoint takes .*Free .* for two more", said(report, "problem"))
    assert report.resumable


def test_a_file_that_cannot_be_read_is_a_finding(killed):
    (killed / "events.jsonl").unlink()
    (killed / "events.jsonl").mkdir()
    assert "events.jsonl: cannot be read: Is a directory" in said(look(killed), "problem")


@pytest.mark.parametrize("harm", [None, "a bit of an array", "run file edited", "metrics deleted"])
def test_the_command_prints_a_table_or_json_and_its_exit_code(killed, capsys, monkeypatch, harm):
    if harm is not None:
        DAMAGE[harm].harm(killed)
    monkeypatch.chdir(killed.parent)
    code = 0 if harm is None else 1
    assert main(["doctor", "run"]) == code
    shown = " ".join(capsys.readouterr().out.split())
    resumable = "spmd-distill train --resume run" in shown
    assert resumable == (harm != "run file edited") and ("problem" in shown) == (code == 1)
    assert main(["doctor", "run", "run", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0) and len(found["runs"]) == 2
    one = found["runs"][0]
    assert one["resumable"] == resumable and {f["status"] for f in one["findings"]} <= {"ok", "note", "problem"}


@pytest.mark.parametrize(("path", "found"), [("absent", "nothing there"), ("run/config.yaml", "a file")])
def test_what_is_no_folder_is_a_mistake_in_the_call(killed, capsys, path, found):
    with pytest.raises(UserError, match=found):
        check_run(killed.parent / path)
    assert main(["doctor", str(killed.parent / path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_no_device_is_asked_for(killed):
    """A run may be using all of a device's memory."""
    script = (
        "import sys; from spmd_distill.cli import main; code = main(['doctor', sys.argv[1]]); import jax;"
        "print('platforms', jax.config.jax_platforms); sys.exit(code)"
    )
    given = {**os.environ, "JAX_PLATFORMS": "cuda"}
    done = subprocess.run([sys.executable, "-c", script, str(killed)], capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    assert "platforms cpu" in done.stdout and "can be resumed from step 4" in done.stdout
