"""The files of a run that grow line by line: what was measured, said and sampled."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from spmd_distill.doctor.finding import Finding
from spmd_distill.metrics.reading import parse_line

CUT = "its last line was cut off."
_MENDED = "Nothing: a resumed run takes it away."


def check_metrics(path: Path, newest: int | None, every: int = 1, alive: bool = False) -> Iterator[Finding]:
    """Check ``metrics.jsonl``: every line, their order and gaps, and where they end.

    Args:
        path: the file.
        newest: the newest good checkpoint's step; None where there is none.
        every: steps between two lines of training.
        alive: a process is writing to it.
    """
    if not path.exists():
        if newest:
            fix = "Bring it back from a copy; else a resumed run's curves begin there."
            yield Finding("problem", path.name, f"is missing, though step {newest} was saved.", fix)
        else:
            yield Finding("note", path.name, "not there yet: nothing was measured.")
        return
    lines, bad, cut = read_lines(path, parse_line)
    for number, reason in bad.items():
        yield Finding("problem", f"{path.name}, line {number}", f"{reason}.", "Delete the line.", blocks=True)
    if cut and not alive:
        yield Finding("note", path.name, CUT, _MENDED)
    trained = [line.step for line in lines if line.split == "train"]
    scored = sum(line.split == "eval" for line in lines)
    if not bad:
        yield Finding("ok", path.name, f"{len(trained)} lines of training, {scored} of evaluation.")
    yield from _order(path.name, trained, every)
    yield from _end(path.name, trained, newest, every, alive)


def _order(name: str, trained: list[int], every: int) -> Iterator[Finding]:
    back = [(a, b) for a, b in pairwise(trained) if b <= a]
    if back:
        (a, b), more = back[0], f" ({len(back)} times in all)" if len(back) > 1 else ""
        fix = "Delete the lines of one of them."
        yield Finding("problem", name, f"step {b} comes after step {a}{more}: two runs wrote here.", fix)
    gaps = [(a, b) for a, b in pairwise([0, *trained]) if b - a > every]
    if gaps:
        shown = ", ".join(str(a + 1) if b - a == 2 else f"{a + 1} to {b - 1}" for a, b in gaps[:4])
        more = f" and {len(gaps) - 4} more" if len(gaps) > 4 else ""
        yield Finding("problem", name, f"no line for steps {shown}{more}.", "Bring it back from a copy, if it matters.")


def _end(name: str, trained: list[int], newest: int | None, every: int, alive: bool) -> Iterator[Finding]:
    last, saved = max(trained, default=0), newest or 0
    if last > saved and not alive:
        fix = "Nothing: a resumed run takes these steps again, and their lines away."
        yield Finding("note", name, f"ends at step {last}, the newest good checkpoint is of step {saved}.", fix)
    elif saved - last >= every:
        yield Finding(
            "problem",
            name,
            f"ends at step {last}, before the newest good checkpoint's step {saved}.",
            "Bring it back from a copy; else a resumed run's curves have a gap.",
        )


def check_records(path: Path, alive: bool = False) -> Iterator[Finding]:
    """Check a file of JSON objects with a step each, such as ``events.jsonl``; nothing where there is none."""
    if not path.exists():
        return
    records, bad, cut = read_lines(path, _record)
    whole = path.read_bytes().split(b"\n") if bad else []
    for number, reason in bad.items():
        where = f"{path.name}, line {number}"
        if number < len(whole) and b'"resumed"' in whole[number]:
            yield Finding("note", where, "was cut off by a kill, after which the run went on.")
        else:
            yield Finding("problem", where, f"{reason}.", "Delete the line: whatever reads the file leaves it out.")
    if cut and not alive:
        yield Finding("note", path.name, CUT, "Nothing: a resumed run goes on with a new line.")
    if not bad:
        yield Finding("ok", path.name, f"{len(records)} line(s).")


def _record(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(found, dict) or not isinstance(found.get("step"), int | None):
        raise ValueError(f"expected a JSON object with a step, found {text[:80].strip()!r}")
    return found


def read_lines(path: Path, parse: Callable[[str], Any]) -> tuple[list[Any], dict[int, str], bool]:
    """What the whole lines of a file hold, what is wrong with the others by their number, and whether the last is cut.

    ``parse`` raises ValueError for a line that is none. Raises OSError.
    """
    found, bad, cut = [], {}, False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                cut = True
                break
            try:
                found.append(parse(line.decode("utf-8")))
            except UnicodeDecodeError as error:
                bad[number] = f"is not UTF-8 at byte {error.start}"
            except ValueError as error:
                bad[number] = " ".join(str(error).split())
    return found, bad, cut
