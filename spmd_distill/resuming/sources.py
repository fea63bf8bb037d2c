"""What a run is trained by and measured on, known again by fingerprints that are saved with every checkpoint."""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spmd_distill.data import AbstractRows
from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer

WHOLE = 256 * 2**20
"""Files up to so many bytes are hashed whole."""
ENDS, BLOCK, BLOCKS = 4 * 2**20, 2**18, 32
"""Of a larger file: so many bytes at either end, and so many blocks of so many bytes spread evenly between."""


class Sources:
    """Teacher, tokenizer and held-out text of a run. The training text is the loader's to check."""

    def __init__(self, teacher: Path, tokenizer: TextTokenizer, heldout: Mapping[str, AbstractRows]):
        """Take the fingerprints: of the teacher's file or folder, of the tokenizer, of the held-out rows."""
        self._found = {
            "tokenizer": tokenizer.fingerprint(),
            "teacher": fingerprint_weights(teacher),
            "heldout": hashlib.sha256(repr(sorted(r.fingerprint() for r in heldout.values())).encode()).hexdigest(),
        }
        self._teacher = teacher

    def meta(self) -> dict[str, Any]:
        """What a checkpoint remembers."""
        return dict(self._found)

    def check(self, meta: Mapping[str, Any], folder: Path, allow_changes: bool = False) -> list[str]:
        """Compare with what the checkpoint of the run in ``folder`` remembers.

        Returns:
            What differs and was allowed, in words. A checkpoint of an older version remembers less, and passes.

        Raises:
            UserError: another tokenizer; another teacher or other held-out text, unless ``allow_changes``.
        """
        known = {name: meta.get(name, found) for name, found in self._found.items()}
        if known["tokenizer"] != self._found["tokenizer"]:
            raise UserError(
                f"The run in {folder} used another tokenizer (fingerprint {known['tokenizer'][:12]}, now "
                f"{self._found['tokenizer'][:12]}). Give the teacher it was started with."
            )
        notes = []
        if known["teacher"] != self._found["teacher"]:
            notes.append(
                f"The run in {folder} had another teacher than {self._teacher}: "
                f"{difference(known['teacher'], self._found['teacher'])}."
            )
        if known["heldout"] != self._found["heldout"]:
            notes.append(
                f"The run in {folder} was evaluated on other held-out text (fingerprint {known['heldout'][:12]}, now "
                f"{self._found['heldout'][:12]}), so evaluations of now and then cannot be compared."
            )
        if notes and not allow_changes:
            raise UserError(f"{' '.join(notes)} Give what it was started with, or accept it with --allow-changes.")
        return notes


def fingerprint_weights(path: str | os.PathLike[str]) -> dict[str, str]:
    """What the weights of a model on disk are known by: a line for each file that decides what the model computes.

    That is ``config.json`` and every ``.safetensors`` file of a folder, or the one GGUF file, whatever its name. A line
    has the size and a sha256: of all bytes up to 256 MiB, else of the first and last 4 MiB and of 32 blocks of 256 KiB
    between. So another model, another training of it, another quantisation and a file that is cut or overwritten are
    noticed; single bytes changed between the blocks of a large file are not.

    Raises:
        UserError: a file cannot be read.
    """
    path = Path(path)
    files = sorted([*path.glob("config.json"), *path.glob("*.safetensors")]) if path.is_dir() else [path]
    try:
        with ThreadPoolExecutor(4, thread_name_prefix="fingerprint") as pool:
            lines = list(pool.map(_line, files))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}. Make it readable.") from error
    return dict(zip([file.name if path.is_dir() else "" for file in files], lines, strict=True))


def _line(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            return f"{size} bytes, sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
        digest = hashlib.sha256()
        middle = [ENDS + i * (size - 2 * ENDS - BLOCK) // (BLOCKS - 1) for i in range(BLOCKS)]
        for begin, length in [(0, ENDS), *((at, BLOCK) for at in middle), (size - ENDS, ENDS)]:
            file.seek(begin)
            digest.update(file.read(length))
        return f"{size} bytes, sha256 of samples {digest.hexdigest()}"


def difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """In what two fingerprints of weights differ first, in words."""
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            found = [_short(lines.get(name, "not there")) for lines in (old, new)]
            return f"{name or 'its file'} was {found[0]}, is {found[1]}"
    return "no difference"


def _short(line: str) -> str:
    """A line with the beginning of its hash."""
    head, _, digest = line.rpartition(" ")
    return f"{head} {digest[:12]}".strip()
