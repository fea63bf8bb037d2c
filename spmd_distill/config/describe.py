"""What settings mean, taken from their own docstrings: the comments of a new run file, and the page of all settings."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from spmd_distill.config.data import SourceConfig
from spmd_distill.config.objective import TermConfig
from spmd_distill.config.objective_features import FeatureConfig
from spmd_distill.config.parse import section_of
from spmd_distill.config.run import RunConfig, to_dict

WIDTH = 100


@cache
def descriptions(cls: Any) -> dict[str, str]:
    """What stands below each field of a config class, in one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            said = text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else ""
            found[field.target.id] = " ".join(str(said).replace("``", "`").split())
    return found


def commented(config: RunConfig, active: Collection[str]) -> str:
    """A run file with every setting and what it means; those that are not ``active`` are commented out (``#name:``)."""
    return "\n".join(_section(config, RunConfig, to_dict(config), "", set(active), 0)).lstrip("\n") + "\n"


def _section(config: Any, cls: Any, values: dict[str, Any], prefix: str, active: set[str], depth: int) -> Iterator[str]:
    indent, said = "  " * depth, descriptions(cls)
    for field in dataclasses.fields(cls):
        name, inner = f"{prefix}{field.name}", section_of(field)
        if inner:
            used = any(a.startswith(f"{name}.") for a in active)
            yield ""
            yield from _wrapped(" ".join((inner.__doc__ or "").replace("``", "`").split()), indent)
            yield f"{indent}{'' if used else '#'}{field.name}:"
            yield from _section(config, inner, values[field.name], f"{name}.", active, depth + 1)
        else:
            yield from _wrapped(said.get(field.name, ""), indent)
            mark = "" if name in active else "#"
            yield f"{indent}{mark}{field.name}: {_flow(values[field.name])}"


def _wrapped(text: str, indent: str) -> list[str]:
    return [f"{indent}# {line}" for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]


def _flow(value: Any) -> str:
    """A value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def settings_page() -> str:
    """The page of all settings, in Markdown: a table a section, and the mappings that some settings hold."""
    sections = {f.name: section_of(f) for f in dataclasses.fields(RunConfig) if section_of(f)}
    lines = [
        "# Settings",
        "",
        "Every setting of a [run file](run-files.md). As a flag it has its section's name before its own,",
        "`--optimizer.learning_rate 1e-4`. `spmd-distill init` writes a run file with all of this in it as comments.",
        "",
        "This page is made from the settings themselves, by `python -m spmd_distill.config.describe`.",
        "",
        ", ".join(f"[`{name}`](#{name})" for name in sections),
        "",
        *_table(RunConfig),
    ]
    for name, cls in sections.items():
        lines += ["", f"## {name}", "", *_paragraph(cls), "", *_table(cls)]
    for title, cls, said in _MAPPINGS:
        lines += ["", f"## {title}", "", said, "", *_table(cls)]
    return "\n".join(lines) + "\n"


_MAPPINGS = (
    ("A source", SourceConfig, "An entry of `data.train` or `data.heldout` that is not just a path."),
    ("A term", TermConfig, "An entry of `objective.terms`. See [Objectives](objectives.md)."),
    (
        "A loss inside",
        FeatureConfig,
        "An entry of `objective.features`, or of `objective.terms`. See [features](features.md).",
    ),
)


def _paragraph(cls: Any) -> list[str]:
    return textwrap.wrap(" ".join((cls.__doc__ or "").replace("``", "`").split()), 120, break_on_hyphens=False)


def _table(cls: Any) -> list[str]:
    cells = [("Setting", "Value", "Default", "Meaning"), ("---",) * 4, *_rows(cls)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def _rows(cls: Any, prefix: str = "") -> Iterator[tuple[str, ...]]:
    """The rows of a section's table, those of a section inside it with its name before their own."""
    written, hints, said = _annotations(cls), get_type_hints(cls), descriptions(cls)
    named = {"Number": "number or [schedule](objectives.md#schedules)", "Any": "as described"}
    for f in dataclasses.fields(cls):
        if (inner := section_of(f)) is None:
            kind = named.get(written[f.name]) or _kind(hints[f.name])
            yield f"`{prefix}{f.name}`", kind, _default(f), said[f.name]
        elif cls is not RunConfig:  # whose sections have tables of their own
            yield from _rows(inner, f"{prefix}{f.name}.")


def _annotations(cls: Any) -> dict[str, str]:
    """The type of every field, as it is written."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}


def _kind(kind: Any) -> str:
    plain = {int: "integer", float: "number", str: "text", bool: "`true`, `false`", type(None): "null"}
    if kind in plain:
        return plain[kind]
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{name}`" for name in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_kind, inside))
    if origin is tuple:
        return f"list of {_kind(inside[0])}"
    if dataclasses.is_dataclass(kind):
        return f"[mapping](#{next(title for title, cls, _ in _MAPPINGS if cls is kind).lower().replace(' ', '-')})"
    return "mapping"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    return f"`{_flow(list(value) if isinstance(value, tuple) else value)}`"


if __name__ == "__main__":
    print(settings_page(), end="")
