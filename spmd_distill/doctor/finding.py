"""One finding of the doctor, and many of them as a table or as JSON."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from spmd_distill.errors import UserError

Status = Literal["ok", "note", "problem"]
"""``note``: worth knowing, and it mends itself or may be meant; ``problem``: something is lost, or will fail."""

_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what mends it."""

    status: Status
    about: str
    """What was looked at: a file of the run folder, a package, a setting."""
    found: str
    fix: str = ""
    """What to do about it; empty where there is nothing to do."""
    blocks: bool = False
    """Whether a run cannot be resumed as long as this stands."""


def worst(findings: Iterable[Finding]) -> Status:
    """The gravest status among findings; ``ok`` where there are none."""
    found = {finding.status for finding in findings}
    return "problem" if "problem" in found else "note" if "note" in found else "ok"


def plain(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Findings as values for JSON."""
    return [asdict(finding) for finding in findings]


def findings_table(title: str, findings: Sequence[Finding]) -> Any:
    """Findings as a table for `rich`."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    for name in ("", "looked at", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        status = f"[{_COLOURS[finding.status]}]{finding.status}[/]"
        table.add_row(status, *map(escape, (finding.about, finding.found, finding.fix)))
    return table


def guarded(about: str, check: Callable[[], Iterable[Finding]], blocks: bool = True) -> list[Finding]:
    """The findings of a check; what it could not read for want of a file or of rights is a problem."""
    try:
        return list(check())
    except UserError as error:
        return [Finding("problem", about, str(error), blocks=blocks)]
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fix = "Make it readable, or mend the disk."
        return [Finding("problem", about, f"{where}cannot be read: {error.strerror or error}.", fix, blocks)]


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
