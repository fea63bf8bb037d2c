"""Several processes that encode. They are started as programs of their own, not forked and not by ``multiprocessing``:
a process with jax's threads must not be forked, and spawning would run an unguarded script of the user's again."""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spmd_distill.data.base import BadRecord
from spmd_distill.data.tokens.chunk import Chunk, Job
from spmd_distill.errors import UserError

Range = tuple[int, int]
_ENDING = 10.0
"""Seconds that a process has to end after it has closed its output."""


def chunks_by_processes(job: Job, ranges: Sequence[Range], workers: int) -> Iterator[Chunk]:
    """The chunks of these ranges of records, in order, made by ``workers`` processes.

    Raises what a worker raised, at the range where it was raised; ends the workers when the iterator is closed.
    """
    processes: list[subprocess.Popen[bytes]] = []
    mine = threading.local()

    def work(wanted: Range) -> Chunk:
        first = not hasattr(mine, "process")
        if first:
            mine.process = _start()
            processes.append(mine.process)
        process: subprocess.Popen[bytes] = mine.process
        assert process.stdin is not None and process.stdout is not None
        try:
            if first:
                pickle.dump(job, process.stdin)
            pickle.dump(wanted, process.stdin)
            process.stdin.flush()
            kind, value = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING)  # its pipes close first
            raise UserError(
                f"{job.source.name}: a process that tokenises ended before its work was done (exit code "
                f"{process.poll()}); most often memory ran out. Set data.workers to fewer."
            ) from error
        if kind == "chunk":
            return value
        raise BadRecord(*value) if kind == "bad" else UserError(value)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenise")
    try:
        yield from pool.map(work, ranges)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        pool.shutdown(wait=True)
        for process in processes:
            process.communicate()


def _start() -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # One thread each: there are as many processes as cores. And none of them may take an accelerator.
    environment = {**os.environ, "PYTHONPATH": paths, "RAYON_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", "spmd_distill.data.tokens.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def answer(job: Job, wanted: Range) -> tuple[str, Any]:
    """What a worker sends back: a chunk, or what went wrong."""
    try:
        return "chunk", job.chunk(*wanted)
    except BadRecord as error:
        return "bad", (error.where, error.reason)
    except UserError as error:
        return "error", str(error)
    except Exception as error:
        return "error", f"{job.source.name}, records {wanted[0]} to {wanted[1]}: {type(error).__name__}: {error}"
