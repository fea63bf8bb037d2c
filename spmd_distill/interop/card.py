"""The card of an exported model: what it is made of, how, and how good it came out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from spmd_distill.interop.export import MARK

Section = str | Mapping[str, Any]
"""Text in Markdown, or names and values. Where the values are mappings too, their names are the columns of a table."""

SECTIONS = ("teacher", "student", "data", "objective", "results")


@dataclass(frozen=True)
class ModelCard:
    """What ``README.md`` of an exported model says. Empty sections are left out."""

    title: str = ""
    """Empty: the folder's name."""
    teacher: Section = ""
    student: Section = ""
    data: Section = ""
    objective: Section = ""
    results: Section = ""
    base_model: str | None = None
    """The hub id of the model it comes from; None takes what the source knows."""
    license: str | None = None
    """As the hub writes it, such as ``apache-2.0``; None takes what the source knows."""
    tags: tuple[str, ...] = ("knowledge-distillation", "spmd_distill")

    def render(self, title: str, base_model: str | None = None, license: str | None = None) -> str:
        """The whole file. The arguments stand in for what the card does not say."""
        front: dict[str, Any] = {
            "library_name": "transformers",
            "pipeline_tag": "text-generation",
            "base_model": self.base_model or base_model,
            "license": self.license or license,
            "tags": list(self.tags),
        }
        front = {name: value for name, value in front.items() if value}
        written = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
        parts = [f"---\n{written}---", MARK, f"# {self.title or title}"]
        for name in SECTIONS:
            if content := getattr(self, name):
                parts += [f"## {name.capitalize()}", _section(content)]
        return "\n\n".join(parts) + "\n"


def read_front_matter(text: str) -> dict[str, Any]:
    """The YAML at the head of a card; empty where there is none, or none that can be read."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    end = next((i for i, line in enumerate(lines[1:], 1) if line.strip() == "---"), 0)
    try:
        found = yaml.safe_load("\n".join(lines[1:end]))
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _section(content: Section) -> str:
    if isinstance(content, str):
        return content.strip()
    if any(isinstance(value, Mapping) for value in content.values()):
        return "\n".join(_table(content))
    return "\n".join(f"- {name}: {_shown(value)}" for name, value in content.items())


def _table(content: Mapping[str, Any]) -> Iterator[str]:
    rows = {name: value if isinstance(value, Mapping) else {"": value} for name, value in content.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    yield "| " + " | ".join(["", *map(_cell, columns)]) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    for name, row in rows.items():
        yield "| " + " | ".join([_cell(name), *(_cell(row.get(column, "")) for column in columns)]) + " |"


def _cell(value: Any) -> str:
    return " ".join(_shown(value).split()).replace("|", r"\|")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return "" if value is None else str(value)
