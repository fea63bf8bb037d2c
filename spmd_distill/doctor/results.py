"""What a finished run leaves: its summary, and the student as a Hugging Face folder."""

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from spmd_distill.doctor.finding import Finding
from spmd_distill.errors import UserError
from spmd_distill.interop import open_huggingface, tokenizer_from_folder
from spmd_distill.runfolder import RunFolder

_JSON = {"summary.json": dict, "samples.json": list, "environment.json": dict, "compiled.json": dict}


def check_files(folder: RunFolder) -> Iterator[Finding]:
    """Check the JSON files of a run, and look for drafts that a kill left."""
    for name, kind in _JSON.items():
        path = folder.path / name
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            wrong = None if isinstance(found, kind) else f"holds a {type(found).__name__}, expected a {kind.__name__}"
        except (ValueError, RecursionError) as error:
            wrong = f"is no JSON: {error}"
        if wrong is not None:
            yield Finding("problem", name, f"{wrong}.", "Delete it: a resumed run writes it again.")
    for path in sorted(folder.path.iterdir()):
        if path.name.endswith(".tmp") or path.name.startswith((".probe-", ".student.")):
            kept = path.name == ".student.replaced" and not folder.student.exists()
            fix = f"Rename it to {folder.student.name}: it is an earlier export." if kept else "Delete it."
            yield Finding("note", path.name, "left by a process that was killed.", fix)


def finished(folder: RunFolder) -> bool:
    """Whether a run came to its end: it has a summary, be it damaged."""
    return (folder.path / "summary.json").exists()


def check_student(folder: RunFolder) -> Iterator[Finding]:
    """Check the exported student of a finished run: config, tokenizer, and that its weights open and are numbers.

    An export has no sha256, so a wrong number that is finite is not noticed.
    """
    try:
        config, weights = open_huggingface(folder.student)
        tokenizer = tokenizer_from_folder(folder.student)
        odd = [name for name in weights if not _finite(weights[name])]
        if odd:
            raise UserError(f"{folder.student}: {odd[0]} holds numbers that are not finite.")
        vocab = config.get("vocab_size")
        if isinstance(vocab, int) and tokenizer.vocab_size > vocab:
            raise UserError(f"{folder.student}: its tokenizer has {tokenizer.vocab_size} tokens, its model {vocab}.")
    except UserError as error:
        fix = f"spmd-distill export {folder.path} OTHER writes it again from the checkpoints."
        yield Finding("problem", "student", str(error), fix)
        return
    yield Finding("ok", "student", f"complete: {len(weights)} tensors, all finite, with config and tokenizer.")


def _finite(array: Any) -> bool:
    return bool(np.isfinite(np.asarray(array, np.float32)).all()) if math.prod(array.shape) else True
