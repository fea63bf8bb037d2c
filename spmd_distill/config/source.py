"""A run file as YAML, read with the line of every setting, so that errors can name it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from spmd_distill.errors import UserError


def read_run_file(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """What a run file says, and the line (from 1) of every setting in it by its dotted name.

    Raises `UserError` naming the line for what is not YAML, is no mapping, or says something twice.
    """
    where = f"Run file {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{where}: no such file. `spmd-distill init {path}` writes one to start from.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise UserError(f"{where}: is empty; expected settings, such as `steps: 100`.")
        if not isinstance(node, yaml.MappingNode):
            raise UserError(
                f"{where}, line {node.start_mark.line + 1}: expected settings, such as `steps: 100`, found a "
                f"{'list' if isinstance(node, yaml.SequenceNode) else 'single value'}."
            )
        lines: dict[str, int] = {}
        _lines(where, node, "", lines, ())
        return yaml.safe_load(text), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise UserError(f"{where}{line}: is not YAML: {error.problem or error.context}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}: is not YAML: {' '.join(str(error).split())}.") from error
    except RecursionError:
        raise UserError(f"{where}: is nested too deeply.") from None


def _lines(where: str, node: Any, prefix: str, lines: dict[str, int], above: tuple[int, ...]) -> None:
    if id(node) in above:
        raise UserError(f"{where}, line {node.start_mark.line + 1}: refers to itself.")
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[f"{prefix}[{index}]"] = item.start_mark.line + 1
            _lines(where, item, f"{prefix}[{index}]", lines, above)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = f"{prefix}.{key.value}".lstrip(".") if isinstance(key, yaml.ScalarNode) else prefix
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                found = key.value if isinstance(key, yaml.ScalarNode) else "something else"
                raise UserError(f"{where}, line {line}: expected the name of a setting, found {found}.")
            if name in lines:
                raise UserError(f"{where}, line {line}: {name} is said twice; it is in line {lines[name]} already.")
            lines[name] = line
            _lines(where, value, name, lines, above)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by their dotted names; lists are leaves."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found
