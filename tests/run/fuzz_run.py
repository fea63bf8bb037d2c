"""Malformed run files, texts, teachers and checkpoints by the hundred: ``python tests/run/fuzz_run.py --cases 200``.

Each must end in one sentence, exit code 2 and no traceback, with every file of the user's as it was.
"""

import argparse
import contextlib
import hashlib
import io
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

Arguments = list[str]
TYPO = str.maketrans("aeiou", "eioua")


def run_file(at: Path, pick: random.Random, settings: dict) -> Arguments:
    """A run file with one mistake in it."""
    section = pick.choice([name for name, value in settings.items() if isinstance(value, dict)])
    key = pick.choice(list(settings[section]))
    text = yaml.safe_dump(settings, sort_keys=False)
    changed = yaml.safe_load(text)

    def put(value: object) -> str:
        changed[section][key] = value
        return yaml.safe_dump(changed, sort_keys=False)

    def typo() -> str:
        changed[section][key.translate(TYPO) + pick.choice(["", "s", "_"])] = changed[section].pop(key)
        return yaml.safe_dump(changed, sort_keys=False)

    def nested() -> str:
        changed[section] = {section: changed[section]}
        return yaml.safe_dump(changed, sort_keys=False)

    ways: list[Callable[[], str | bytes]] = [
        typo,
        nested,
        lambda: put({"a": {"b": [1, 2]}}),
        lambda: put([[["x"]]]),
        lambda: put(float(pick.choice(["nan", "inf", "-inf"]))) if key != "layers" else put([float("nan")]),
        lambda: text.replace(f"{section}:", f"{section.translate(TYPO)}:", 1),
        lambda: text + f"\nsteps: {pick.choice(['many', '-3', '0', '1.5', 'null', '[1]', '1e400'])}\n",
        lambda: text.replace("steps:", "steps: {", 1),
        lambda: text[: pick.randrange(len(text) // 2)] + "\n  - [",
        lambda: pick.randbytes(pick.randrange(1, 300)) + b"\xff\x00",
        lambda: text + f"\n{section}: {pick.choice(['3', 'word', '[1, 2]'])}\n",
        lambda: text + text,
        lambda: text + f"data: !!python/name:os.{pick.choice(['remove', 'system'])}\n",
        lambda: f"{text}x: &x [*x]\n",
    ]
    written = pick.choice(ways)()
    at.write_bytes(written if isinstance(written, bytes) else written.encode())
    return ["train", str(at)]


def text(at: Path, pick: random.Random, settings: dict) -> Arguments:
    """Training text that cannot be read, or of which nothing is left."""
    where = at.with_suffix(".texts")
    where.mkdir()
    file = where / pick.choice(["a.txt", "b.txt"])
    kinds: list[Callable[[], object]] = [
        lambda: file.write_bytes(b"words " * 50 + bytes([pick.randrange(0x80, 0xC0)]) + b" more"),
        lambda: file.write_bytes(b""),
        lambda: file.write_text("x"),
        lambda: file.with_suffix(".docx").write_bytes(pick.randbytes(200)),
        lambda: None,
        lambda: file.mkdir(),
        lambda: file.symlink_to(where / "nowhere.txt"),
        lambda: file.write_bytes("sixteen".encode("utf-16")),
    ]
    pick.choice(kinds)()
    settings["data"]["train"] = [str(pick.choice([where, file]))]
    settings["data"].pop("heldout", None)
    at.write_text(yaml.safe_dump(settings))
    return ["train", str(at)]


def teacher(at: Path, pick: random.Random, settings: dict) -> Arguments:
    """A damaged model folder, or another file altogether."""
    folder = at.with_suffix(".teacher")
    shutil.copytree(settings["teacher"]["path"], folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    size = weights.stat().st_size
    kinds: list[Callable[[], object]] = [
        lambda: os.truncate(weights, pick.randrange(size)),
        lambda: os.truncate(config, pick.randrange(config.stat().st_size)),
        weights.unlink,
        config.unlink,
        (folder / "tokenizer.json").unlink,
        lambda: (folder / "tokenizer.json").write_text('{"version": "1.0"}'),
        lambda: config.write_text(config.read_text().replace(": 48", f": {pick.choice([47, 0, -1, 96])}")),
        lambda: config.write_text(config.read_text().replace("LlamaForCausalLM", pick.choice(["T5Model", ""]))),
        lambda: weights.write_bytes(pick.randbytes(size)),
        lambda: shutil.rmtree(folder),
    ]  # fmt: skip
    pick.choice(kinds)()
    settings["teacher"]["path"] = str(folder)
    at.write_text(yaml.safe_dump(settings))
    return ["train", str(at)]


def checkpoints(at: Path, pick: random.Random, settings: dict) -> Arguments:
    """A run whose every checkpoint is damaged."""
    run = at.with_suffix(".run")
    shutil.copytree(settings["run"], run)
    for step in (run / "checkpoints").iterdir():
        files = sorted(p for p in step.rglob("*") if p.is_file() and p.stat().st_size and p.parent != step)
        file = pick.choice(files)
        bytes_ = bytearray(file.read_bytes())
        bytes_[pick.randrange(len(bytes_))] ^= 1 << pick.randrange(8)
        kinds: list[Callable[[], object]] = [
            lambda file=file, bytes_=bytes_: file.write_bytes(bytes_),
            lambda file=file, bytes_=bytes_: os.truncate(file, pick.randrange(len(bytes_))),
            file.unlink,
            (step / "manifest.json").unlink,
            lambda step=step: os.truncate(step / "manifest.json", 10),
            lambda step=step: (step / "manifest.json").write_text("[]"),
        ]
        pick.choice(kinds)()
    return ["train", "--resume", str(run)]


KINDS = {"run file": run_file, "text": text, "teacher": teacher, "checkpoints": checkpoints}
SHARES = {"run file": 0.6, "text": 0.15, "teacher": 0.15, "checkpoints": 0.1}


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, by its content."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() or p.is_symlink())
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() if p.exists() else "link" for p in files}


def cases(count: int, seed: int) -> Iterator[tuple[str, int]]:
    """(kind, seed of the case), every kind with its share and at least once."""
    for kind, share in SHARES.items():
        for number in range(max(1, round(count * share))):
            yield kind, seed + number


def check(kind: str, seed: int, folder: Path, settings: dict) -> str | None:
    """Make a case, run the command on it; what is wrong with its answer, or None."""
    from spmd_distill.cli import main

    at = folder / f"{kind.replace(' ', '-')}-{seed}.yaml"
    fresh = yaml.safe_load(yaml.safe_dump(settings)) | ({} if kind == "checkpoints" else {"run": str(folder / "new")})
    arguments = KINDS[kind](at, random.Random(f"{kind} {seed}"), fresh)
    before, out, err = tree(folder), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    shown = err.getvalue()
    if code != 2:
        return f"exit code {code}: {shown[-300:]}"
    if "Traceback" in shown or shown.count("spmd-distill: error: ") != 1:
        return f"no single sentence: {shown[-300:]}"
    if tree(folder) != before:
        return f"changed {sorted(set(tree(folder).items()) ^ set(before.items()))[:3]}"
    return None


def prepare(folder: Path) -> dict:
    """A tiny teacher, text, and a finished run of two steps; the settings of that run."""
    from rich.console import Console
    from tiny import tiny_run

    from spmd_distill.config import to_dict
    from spmd_distill.train import distil

    config = tiny_run(
        folder, "--steps", "2", "--mesh", "single", "--checkpoint.every", "1", "--data.micro_batches", "1"
    )
    distil(config, console=Console(quiet=True))
    return to_dict(config)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from spmd_distill.runtime import prepare_jax

    prepare_jax(fast_compile=True)
    began, right, wrong = time.monotonic(), Counter(), []
    with tempfile.TemporaryDirectory() as name:
        settings = prepare(Path(name))
        for kind, seed in cases(options.cases, options.seed):
            found = check(kind, seed, Path(name), settings)
            right[kind] += found is None
            if found is not None:
                wrong.append(f"{kind} {seed}: {found}")
    for kind in SHARES:
        print(f"{kind:12} {right[kind]:4} one sentence, exit code 2, nothing changed")
    print(f"{sum(right.values())} of {options.cases} right in {time.monotonic() - began:.0f} s")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
