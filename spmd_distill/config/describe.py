"""What settings mean, taken from their own docstrings: the comments of a new run file, and the page of all settings."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import yaml

from spmd_distill.config.parse import expected, section_of, type_of
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
    """The page of all settings, in Markdown."""
    lines = [
        "# Settings",
        "",
        "Every setting of a run file, with its type and default. `spmd-distill init` writes them all into a new run",
        "file. This page is made from the settings themselves: `python -m spmd_distill.config.describe`.",
    ]
    lines += ["", "| Setting | Type | Default | |", "|---|---|---|---|"]
    plain = [f for f in dataclasses.fields(RunConfig) if not section_of(f)]
    lines += [_row(RunConfig, f, "") for f in plain]
    for field in dataclasses.fields(RunConfig):
        if inner := section_of(field):
            lines += ["", f"## {field.name}", "", " ".join((inner.__doc__ or "").replace("``", "`").split())]
            lines += ["", "| Setting | Type | Default | |", "|---|---|---|---|"]
            lines += [_row(inner, f, f"{field.name}.") for f in dataclasses.fields(inner)]
    return "\n".join(lines) + "\n"


def _row(cls: Any, field: dataclasses.Field[Any], prefix: str) -> str:
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore
    kind = expected(type_of(prefix + field.name)).removeprefix("one of ")
    cells = (f"`{field.name}`", kind, f"`{_flow(to_dict_value(value))}`", descriptions(cls).get(field.name, ""))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def to_dict_value(value: Any) -> Any:
    """A default in the types of YAML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    return [to_dict_value(v) for v in value] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    print(settings_page(), end="")
