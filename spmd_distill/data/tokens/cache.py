"""A source's tokens: read from the cache, or made and kept there."""

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spmd_distill.data.base import AbstractSource
from spmd_distill.data.encode import Encoder
from spmd_distill.data.intake import IntakeReport, OnBad
from spmd_distill.data.rows.table import COLUMNS, TokenTable
from spmd_distill.data.tokens.chunk import Chunk, Job, joined, report_of
from spmd_distill.data.tokens.pool import chunks_by_processes
from spmd_distill.errors import UserError

VERSION = 1
"""Of the files. Another one is another key: older files are left alone and never read."""
_MANIFEST = "manifest.json"
_LONG, _TRY, _SAY = 20.0, 3.0, 10.0
"""Seconds: work that takes longer is shared by processes; how long the first one tries before it judges that; between
two lines of progress."""


@dataclass(frozen=True)
class Settings:
    """How a source is tokenised, and where the tokens are kept."""

    folder: Path | None = None
    """Of the cache; None keeps nothing on disk."""
    on_bad: OnBad = "error"
    limit: int | None = None
    """Take about so many tokens, of records spread over the source; None: all."""
    workers: int | None = None
    """Processes; None: one a core where it takes long."""
    say: Callable[[str], None] = lambda message: None


def token_table(
    source: AbstractSource, encoder: Encoder, settings: Settings = Settings()
) -> tuple[TokenTable, IntakeReport]:
    """The tokens of all records of a source, and what was read.

    With a folder they are made once: what is there under the same key (text, tokenizer, chat template, loss, limits)
    is verified against its sha256 and mapped into memory. What is damaged is made again. A process that is interrupted
    leaves its chunks behind, and the next one goes on from them. Of several processes on one folder, one works.

    Raises:
        BadRecord: a record is bad, and may not be skipped.
        UserError: there is no record, all are bad, or the cache cannot be written.
    """
    made_of = {
        "text": source.fingerprint(),
        "tokenizer": encoder.tokenizer.fingerprint(),
        "encoding": encoder.fingerprint(),
        "loss": encoder.loss,
        "limit": settings.limit,
    }
    job = Job(source, encoder, settings.on_bad)
    if settings.folder is None:
        chunks = [chunk for _, chunk in sorted(_chunks(job, settings, None), key=lambda pair: pair[0])]
        report = _checked([chunk.report for chunk in chunks], source)
        return _filled(_arrays(report.tokens, report.examples, None), chunks, made_of), report
    key = hashlib.sha256(json.dumps([VERSION, settings.on_bad, made_of], sort_keys=True).encode()).hexdigest()[:32]
    folder = settings.folder / key
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        with _only_one(settings.folder / f"{key}.lock", source.name, settings.say):
            found = _open(folder, made_of, source.name, settings.say)
            if found is None:
                _make(job, settings, folder)
                found = _open(folder, made_of, source.name, settings.say)
    except OSError as error:
        raise UserError(
            f"data.cache: the tokens of {source.name} cannot be kept in {settings.folder}: {error}. Make room, name "
            "another folder, or set data.cache to null to keep them in memory alone."
        ) from error
    if found is None:
        raise UserError(
            f"data.cache: {folder} does not hold what was just written there. Check the disk, or name another folder."
        )
    return found


def _make(job: Job, settings: Settings, folder: Path) -> None:
    """Make the tokens, chunk by chunk, and then the files of the cache, in one rename."""
    parts, half = folder.with_suffix(".parts"), folder.with_suffix(".half")
    parts.mkdir(exist_ok=True)
    sizes = {index: (chunk.tokens, chunk.report) for index, chunk in _chunks(job, settings, parts)}
    report = _checked([sizes[index][1] for index in sorted(sizes)], job.source)
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    arrays = _arrays(sum(tokens for tokens, _ in sizes.values()), report.examples, half)
    table = _filled(arrays, (_whole(parts, index) for index in sorted(sizes)), {})
    for array in arrays.values():
        array.flush()  # pyright: ignore[reportAttributeAccessIssue]
    manifest = {"version": VERSION, "sha256": table.sha256, "report": dataclasses.asdict(report)}
    (half / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    half.rename(folder)
    shutil.rmtree(parts, ignore_errors=True)


def _open(
    folder: Path, made_of: dict[str, Any], name: str, say: Callable[[str], None]
) -> tuple[TokenTable, IntakeReport] | None:
    """What the cache holds, verified; None where it holds nothing, or nothing whole."""
    if not folder.exists():
        return None
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        arrays = {column: np.load(folder / f"{column}.npy", mmap_mode="r") for column in COLUMNS}
        table = TokenTable(**arrays, sha256="", made_of=made_of).hashed()
        report = report_of(manifest["report"])
        reason = None if table.sha256 == manifest["sha256"] else "its sha256 is another than when it was written"
    except Exception as error:  # whatever is wrong with the files, they can be made again
        table = report = None
        reason = str(error) or type(error).__name__
    if table is None or report is None or reason is not None:
        say(f"data.cache: the tokens of {name} in {folder} are damaged ({reason}); tokenising again")
        return None
    return table, report


def _chunks(job: Job, settings: Settings, parts: Path | None) -> Iterator[tuple[int, Chunk]]:
    """The chunks of a source by their numbers; in ``parts`` they are kept, and those that are there are taken."""
    ranges, order = _ranges(len(job.source), settings.limit)
    began = said = time.monotonic()
    tokens = records = made = 0
    shared: Iterator[Chunk] | None = None
    workers = settings.workers or os.cpu_count() or 1
    there = {index for index in order if parts is not None and (parts / f"{index}.npz").exists()}
    try:
        for done, index in enumerate(order):
            chunk = Chunk.load(parts / f"{index}.npz") if parts is not None and index in there else None
            if chunk is None:
                spent, left = time.monotonic() - began, len(order) - done
                slow = spent > _TRY and spent / max(made, 1) * left > _LONG
                if shared is None and workers > 1 and left > 1 and (slow or settings.workers is not None):
                    missing = [i for i in order[done:] if i not in there]
                    shared = chunks_by_processes(job, [ranges[i] for i in missing], min(workers, len(missing)))
                chunk = job.chunk(*ranges[index]) if shared is None or index in there else next(shared)
                made += 1
                if parts is not None:
                    chunk.save(parts / f"{index}.npz")
            tokens, records = tokens + chunk.tokens, records + chunk.report.records
            yield index, chunk
            now = time.monotonic()
            if now - said > _SAY:
                said = now
                settings.say(
                    f"{job.source.name}: {records:,} of {len(job.source):,} records tokenised, {tokens:,} tokens, "
                    f"{tokens / (now - began):,.0f} a second"
                )
            if settings.limit is not None and tokens >= settings.limit:
                return
    finally:
        if shared is not None:
            shared.close()  # pyright: ignore[reportAttributeAccessIssue]


def _ranges(records: int, limit: int | None) -> tuple[list[tuple[int, int]], Sequence[int]]:
    """Ranges of records, and the order to take them in: spread over the source where not all are wanted."""
    each = min(max(records // 256, 1), 2048 if limit is None else 64)
    ranges = [(first, min(first + each, records)) for first in range(0, records, each)]
    if limit is None:
        return ranges, range(len(ranges))
    return ranges, np.random.default_rng(0).permutation(len(ranges)).tolist()


def _arrays(tokens: int, examples: int, folder: Path | None) -> dict[str, np.ndarray]:
    sizes = {"tokens": tokens, "loss": tokens, "offsets": examples + 1, "hashes": examples}
    if folder is None:
        return {name: np.empty(size, COLUMNS[name]) for name, size in sizes.items()}
    return {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", COLUMNS[name], (size,))
        for name, size in sizes.items()
    }


def _filled(arrays: dict[str, np.ndarray], chunks: Iterable[Chunk], made_of: dict[str, Any]) -> TokenTable:
    """The table in these arrays, of the chunks one after another."""
    tokens = examples = 0
    arrays["offsets"][0] = 0
    for chunk in chunks:
        found, count = chunk.arrays, len(chunk.arrays["hashes"])
        for name in ("tokens", "loss"):
            arrays[name][tokens : tokens + chunk.tokens] = found[name]
        arrays["offsets"][examples + 1 : examples + count + 1] = found["offsets"][1:] + tokens
        arrays["hashes"][examples : examples + count] = found["hashes"]
        tokens, examples = tokens + chunk.tokens, examples + count
    return TokenTable(**arrays, sha256="", made_of=made_of).hashed()


def _whole(parts: Path, index: int) -> Chunk:
    chunk = Chunk.load(parts / f"{index}.npz")
    if chunk is None:
        raise OSError(f"{parts / f'{index}.npz'} was damaged while it was in use")
    return chunk


def _checked(reports: Sequence[IntakeReport], source: AbstractSource) -> IntakeReport:
    if not len(source):
        raise UserError(f"{source.name}: holds no record. Leave it out, or fill it.")
    report = joined(reports)
    if not report.examples:
        raise UserError(f"{source.name}: all {report.records} records are bad. The first: {'; '.join(report.first)}")
    return report


@contextmanager
def _only_one(lock: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file, which the system lets go of when this process ends, however it ends."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that tokenises {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
