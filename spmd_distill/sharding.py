"""Mesh layouts: which device holds which slice of what.

A layout is a YAML file: the sizes of the mesh axes, and rules from logical axes (what a dimension of an array *means*)
to mesh axes. Everything else about sharding is derived from it. This is the only file that writes a `PartitionSpec`.

Mesh axes: ``data`` (rows of the batch; with the rule ``embed: data`` also a slice of every parameter, FSDP), ``model``
(tensor parallel) and, if a layout wants it, ``replica`` (data parallel across slices or pods, parameters copied).
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import yaml
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmd_distill.errors import UserError
from spmd_distill.runtime import layouts_folder

LOGICAL_AXES: dict[str, tuple[str, ...]] = {
    "batch": ("replica", "data"),
    "length": ("model",),
    "embed": ("data",),
    "act_embed": (),
    "heads": ("model",),
    "kv_heads": ("model",),
    "head_dim": (),
    "mlp": ("model",),
    "vocab": ("model", "data"),
    "layers": (),
}
"""Every logical axis, and the mesh axes that a rule may give it."""

MESH_AXES = ("replica", "data", "model")
TENSOR_PARALLEL = ("heads", "kv_heads", "mlp", "vocab")
CUT_ELSEWHERE = ("heads", "kv_heads")
"""Axes that need not divide: the array is then cut along ``embed``, gathered where it is used, and each shard takes its
own heads out of it."""

Spec: TypeAlias = PartitionSpec
Specs = Any
"""A pytree of `PartitionSpec`, or a prefix of one."""


@dataclass(frozen=True)
class MeshLayout:
    """The axes of a device mesh and the rules that place logical axes on them."""

    name: str
    axes: tuple[tuple[str, int], ...]
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    # -- reading --------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, name_or_path: str | Path) -> "MeshLayout":
        """Read a built-in layout by name (``dp2_tp4``) or anybody's by path (``my/pod.yaml``).

        Raises `UserError` for an unknown name, a file that is not such YAML, and every misuse that `validate` knows.
        """
        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml"):
            path = layouts_folder() / f"{name_or_path}.yaml"
            if not path.is_file():
                near = difflib.get_close_matches(str(name_or_path), layout_names(), n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise UserError(
                    f"No mesh layout is called {str(name_or_path)!r}.{hint} Built in: {', '.join(layout_names())}; "
                    f"your own is given by its path, ending in .yaml."
                )
        try:
            content = yaml.safe_load(path.read_text())
        except OSError as error:
            raise UserError(f"The mesh layout {path} cannot be read: {error.strerror}.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"The mesh layout {path} is not YAML: {error}") from error
        return cls.from_dict(content, name=path.stem)

    @classmethod
    def from_dict(cls, content: Any, name: str) -> "MeshLayout":
        """Build and validate a layout from ``{"axes": {axis: size}, "rules": {logical axis: mesh axis or list}}``."""
        if not isinstance(content, Mapping) or set(content) != {"axes", "rules"}:
            found = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
            raise UserError(f"Mesh layout {name!r}: expected the keys axes and rules, found {found}.")
        if not all(isinstance(content[key], Mapping) for key in ("axes", "rules")):
            raise UserError(f"Mesh layout {name!r}: axes and rules must each be a mapping.")
        for axis, size in content["axes"].items():
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
                raise UserError(
                    f"Mesh layout {name!r}: axis {axis!r} has size {size!r}; a positive integer was expected, or -1 "
                    f"for all devices that the other axes leave."
                )
        for logical, found in content["rules"].items():
            listed = found if isinstance(found, list | tuple) else (found or "",)
            if not all(isinstance(axis, str) for axis in (logical, *listed)):
                raise UserError(
                    f"Mesh layout {name!r}: the rule {logical!r}: {found!r} was expected to be the name of a logical "
                    f"axis and the name, or a list of the names, of mesh axes."
                )
        rules = {k: (v,) if isinstance(v, str) else tuple(v or ()) for k, v in content["rules"].items()}
        layout = cls(name, tuple(content["axes"].items()), tuple(rules.items()))
        layout.validate()
        return layout

    def validate(self) -> None:
        """Raise `UserError` for every way in which axes and rules do not make a layout."""
        sizes, rules, where = self.sizes, dict(self.rules), f"Mesh layout {self.name!r}"
        if unknown := [a for a in sizes if a not in MESH_AXES]:
            raise UserError(f"{where}: unknown mesh axis {unknown[0]!r}; known are {', '.join(MESH_AXES)}.")
        if missing := [a for a in ("data", "model") if a not in sizes]:
            raise UserError(f"{where}: axis {missing[0]!r} is missing; give it size 1 if it is not wanted.")
        if list(sizes.values()).count(-1) > 1:
            raise UserError(f"{where}: only one axis may have size -1, found {sizes}.")
        for logical, mesh_axes in rules.items():
            if logical not in LOGICAL_AXES:
                near = difflib.get_close_matches(logical, LOGICAL_AXES, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise UserError(
                    f"{where}: unknown logical axis {logical!r}.{hint} Known are {', '.join(LOGICAL_AXES)}."
                )
            for axis in mesh_axes:
                if axis not in sizes:
                    raise UserError(
                        f"{where}: the rule {logical}: {axis} names a mesh axis that is not among axes "
                        f"({', '.join(sizes)})."
                    )
                if axis not in LOGICAL_AXES[logical]:
                    allowed = ", ".join(LOGICAL_AXES[logical]) or "nothing: it is always whole"
                    raise UserError(f"{where}: {logical!r} cannot lie on {axis!r}; it may lie on {allowed}.")
            if len(set(mesh_axes)) < len(mesh_axes):
                raise UserError(f"{where}: the rule for {logical!r} uses a mesh axis twice: {list(mesh_axes)}.")
        used = {axis for mesh_axes in rules.values() for axis in mesh_axes}
        if idle := [a for a, n in sizes.items() if n != 1 and a not in used]:
            raise UserError(
                f"{where}: no rule uses the mesh axis {idle[0]!r} of size {sizes[idle[0]]}: its devices would only "
                f"repeat each other's work. Add a rule for it or give it size 1."
            )
        if absent := [a for a, n in sizes.items() if a != "model" and n != 1 and a not in rules.get("batch", ())]:
            raise UserError(f"{where}: the rows of the batch must lie on {absent[0]!r}; add it to the rule batch.")
        if rules.get("vocab", ("model",)) not in (("model",), ("model", "data")):
            raise UserError(
                f"{where}: vocab lies on {list(rules['vocab'])}; expected model, or [model, data] in this order."
            )
        if sizes["model"] != 1 and (whole := [a for a in TENSOR_PARALLEL if rules.get(a, ())[:1] != ("model",)]):
            raise UserError(
                f"{where}: axis model has size {sizes['model']}, so {', '.join(TENSOR_PARALLEL)} must all lie on it; "
                f"the rule {whole[0]}: model is missing."
            )

    # -- what it says ---------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> number of shards along it, in mesh order."""
        return dict(self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The mesh axes, in mesh order."""
        return tuple(self.sizes)

    @property
    def device_count(self) -> int:
        """Devices the layout spans; an axis of size -1 counts as 1 until `resolve`."""
        return math.prod(max(n, 1) for n in self.sizes.values())

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that rows of the batch are spread over."""
        return dict(self.rules).get("batch", ())

    @property
    def batch_shards(self) -> int:
        """Into how many shards the rows of a batch are cut."""
        return math.prod(self.sizes[a] for a in self.batch_axes)

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """The mesh axes that the vocabulary is spread over, outermost first."""
        return dict(self.rules).get("vocab", ()) or ("model",)

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """The mesh axes over which both the vocabulary and the rows of the batch are spread."""
        return tuple(a for a in self.vocab_axes if a in self.batch_axes)

    @property
    def fsdp_axis(self) -> str | None:
        """The mesh axis parameters are sharded over along ``embed``, if any."""
        return next(iter(dict(self.rules).get("embed", ())), None)

    @property
    def sequence_sharded(self) -> bool:
        """Whether activations between blocks are sharded along the sequence (rule ``length: model``)."""
        return dict(self.rules).get("length", ()) == ("model",)

    def with_whole_rows(self) -> "MeshLayout":
        """The layout with uncut sequences between blocks. Parameters lie where they lay."""
        return replace(self, rules=tuple(rule for rule in self.rules if rule[0] != "length"))

    def resolve(self, devices: int) -> "MeshLayout":
        """Fill in an axis of size -1 for ``devices`` devices; raise `UserError` where the layout does not fit them."""
        if -1 in self.sizes.values():
            rest, left = divmod(devices, self.device_count)
            if left or not rest:
                raise UserError(
                    f"Mesh layout {self.name!r}: its axes {self.sizes} do not divide the {devices} devices found."
                )
            return replace(self, axes=tuple((a, rest if n == -1 else n) for a, n in self.axes))
        if self.device_count > devices:
            raise UserError(
                f"Mesh layout {self.name!r} spans {self.device_count} devices ({self.sizes}), but {devices} were "
                f"found. Choose a smaller layout ({', '.join(layout_names(devices))}) or, to simulate devices on a "
                f"CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={self.device_count} before jax starts."
            )
        return self

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Build the device mesh out of the first devices found, or of those given."""
        devices = list(jax.devices() if devices is None else devices)
        layout = self.resolve(len(devices))
        return jax.make_mesh(
            tuple(layout.sizes.values()),
            layout.axis_names,
            axis_types=(AxisType.Auto,) * len(layout.sizes),
            devices=devices[: layout.device_count],
        )

    def spec(self, logical: Sequence[str | None], shape: Sequence[int] | None = None, name: str = "array") -> Spec:
        """Place an array whose dimensions have these logical axes (None: always whole).

        With ``shape`` given, raise `UserError` where a dimension does not divide. Heads are the exception: an array
        whose heads do not divide is cut along ``embed`` instead, or is whole if that does not divide either. An array
        whose vocabulary lies on an axis is not cut along ``embed`` over it. Axes with one shard are left out.
        """
        rules = dict(self.rules)
        entries = [rules.get(axis, ()) if axis is not None else () for axis in logical]
        if "vocab" in logical and "embed" in logical:
            rows = entries[logical.index("vocab")]
            entries[logical.index("embed")] = tuple(a for a in entries[logical.index("embed")] if a not in rows)
        for i, (axis, mesh_axes) in enumerate(zip(logical, entries, strict=True)):
            shards = math.prod(self.sizes[a] for a in mesh_axes)
            if shape is None or shape[i] % shards == 0:
                continue
            if axis not in CUT_ELSEWHERE:
                raise UserError(
                    f"{name}: dimension {i} ({axis}) has size {shape[i]}, which mesh layout {self.name!r} cannot cut "
                    f"into {shards} equal shards over {' x '.join(mesh_axes)}. Choose a layout whose axis divides it, "
                    f"or another size."
                )
            entries[i] = ()
            if "embed" in logical:
                j = logical.index("embed")
                longer = (*entries[j], *(a for a in mesh_axes if a not in entries[j]))
                if shape[j] % math.prod(self.sizes[a] for a in longer) == 0:
                    entries[j] = longer
        seen: dict[str, Any] = {}
        for axis, mesh_axes in zip(logical, entries, strict=True):
            for mesh_axis in mesh_axes:
                if mesh_axis in seen:
                    raise UserError(
                        f"{name}: mesh layout {self.name!r} puts both {seen[mesh_axis]} and {axis} on mesh axis "
                        f"{mesh_axis!r}; one array can use an axis once."
                    )
                seen[mesh_axis] = axis
        return _made([tuple(a for a in e if self.sizes[a] != 1) for e in entries])

    def fitted(self, spec: "Spec", shape: Sequence[int]) -> "Spec":
        """``spec`` without the cuts that ``shape`` does not divide into."""
        cuts = spec_axes(spec, len(shape))
        return _made(
            [e if n % math.prod(self.sizes[a] for a in e) == 0 else () for e, n in zip(cuts, shape, strict=True)]
        )

    def spread(self, spec: "Spec", shape: Sequence[int], axes: Sequence[str]) -> "Spec":
        """``spec`` with the first dimension that divides also cut over those of ``axes`` that it leaves out."""
        cuts = list(spec_axes(spec, len(shape)))
        more = tuple(a for a in axes if self.sizes[a] != 1 and a not in sharded_axes(spec))
        for i, (axes_of, size) in enumerate(zip(cuts, shape, strict=True)):
            if more and size % math.prod(self.sizes[a] for a in (*axes_of, *more)) == 0:
                cuts[i] = (*axes_of, *more)
                return _made(cuts)
        return spec


REPLICATED: Spec = PartitionSpec()
"""Whole on every device."""


def layout_names(devices: int | None = None) -> list[str]:
    """Names of the built-in layouts, sorted; with ``devices``, only those that fit so many devices exactly or less."""
    names = sorted(p.stem for p in layouts_folder().glob("*.yaml"))
    return [n for n in names if devices is None or MeshLayout.load(n).device_count <= devices]


def _made(axes: Sequence[tuple[str, ...]]) -> Spec:
    return PartitionSpec(*(e[0] if len(e) == 1 else e or None for e in axes))


def spec_axes(spec: Spec, ndim: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each of ``ndim`` dimensions, as tuples."""
    entries = tuple(spec) + (None,) * (ndim - len(spec))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def sharded_axes(spec: Spec) -> frozenset[str]:
    """All mesh axes that a spec uses."""
    return frozenset(axis for axes in spec_axes(spec, len(spec)) for axis in axes)


def is_spec(x: Any) -> bool:
    """For `jax.tree.map(..., is_leaf=is_spec)` over trees of specs."""
    return isinstance(x, PartitionSpec)


def named(mesh: Mesh, specs: Specs) -> Any:
    """Turn a tree of specs into a tree of `NamedSharding` over ``mesh``."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)


def over_flat_axis(body: Callable[..., Any], devices: Sequence[Any], axis: str) -> Callable[..., Any]:
    """Map ``body`` over the leading axis of arrays ``[n, ...]``, one of n devices each; the axis is called ``axis``."""
    spec = PartitionSpec(axis)

    def one(*args: Any) -> Any:
        out = body(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], out)

    return jax.shard_map(one, mesh=Mesh(list(devices), (axis,)), in_specs=spec, out_specs=spec, check_vma=False)
