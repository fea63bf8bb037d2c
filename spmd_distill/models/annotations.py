"""Where an array of somebody else's lies: from the names its dimensions are annotated with to a spec of a layout."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from spmd_distill.errors import UserError
from spmd_distill.sharding import LOGICAL_AXES, MESH_AXES, MeshLayout, Spec

Rule = Any
"""Where a named axis lies: on a logical axis of ours, on a mesh axis, on a tuple of these, or on None: it is whole."""


def annotated_spec(
    axes: Iterable[Rule] | None, shape: tuple[int, ...], layout: MeshLayout, rules: Mapping[str, Rule], name: str
) -> Spec:
    """Place an array of this shape whose dimensions are called ``axes`` (or fewer; the rest, and None, are whole).

    A name is looked up in ``rules`` first; what is left is a logical axis of ours, which lies where the layout says, or
    a mesh axis, which is taken at its word if the layout has it. A `PartitionSpec` is such a sequence.

    Raises `UserError` naming the array: an axis that nothing places, more axes than dimensions, a dimension that does
    not divide, a mesh axis that is used twice.
    """
    entries = () if axes is None else tuple(axes)
    if len(entries) > len(shape):
        raise UserError(
            f"{name} is annotated with {len(entries)} axes, {entries}, but has {len(shape)} dimensions, {shape}."
        )
    logical: list[str | None] = []
    extra: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        found = _resolve(entry, rules, name)
        if len(found) == 1 and found[0] in LOGICAL_AXES:
            logical.append(found[0])
            continue
        on_mesh = [m for axis in found for m in (dict(layout.rules).get(axis, ()) if axis in LOGICAL_AXES else (axis,))]
        there = tuple(axis for axis in on_mesh if axis in layout.sizes)
        # To the layout, mesh axes that are named outright are one more logical axis, with a rule.
        logical.append("+".join(there) or None)
        extra["+".join(there)] = there
    known = replace(layout, rules=(*layout.rules, *extra.items()))
    return known.spec([*logical, *[None] * (len(shape) - len(entries))], shape, name)


def _resolve(entry: Rule, rules: Mapping[str, Rule], name: str) -> tuple[str, ...]:
    """The logical axes of ours and mesh axes that an entry stands for."""
    if entry is None:
        return ()
    if not isinstance(entry, str):
        return tuple(axis for part in entry for axis in _resolve(part, rules, name))
    found = rules.get(entry, entry)
    listed = () if found is None else (found,) if isinstance(found, str) else tuple(found)
    unknown = [axis for axis in listed if axis not in LOGICAL_AXES and axis not in MESH_AXES]
    if not unknown:
        return listed
    expected = f"a mesh axis ({', '.join(MESH_AXES)}), a logical axis ({', '.join(LOGICAL_AXES)}) or None"
    if entry in rules:
        raise UserError(f"{name}: the rule {entry!r}: {found!r} leads nowhere; expected {expected}.")
    near = difflib.get_close_matches(entry, [*rules, *LOGICAL_AXES, *MESH_AXES], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(
        f"{name} is annotated with {entry!r}, which no rule places.{hint} Add rules={{{entry!r}: ...}} with {expected}."
    )
