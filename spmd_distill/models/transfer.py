"""Parameters out of checkpoints and back, a layer of a parameter at a time: never whole on the host."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from spmd_distill.distributed import fetch
from spmd_distill.errors import UserError
from spmd_distill.mappers import AbstractMapper
from spmd_distill.models.base import Model, path_name
from spmd_distill.models.naming import Box, Rule, Sliceable
from spmd_distill.types import Params

HARMLESS = re.compile(r"(^|\.)(rotary(_emb)?\.inv_freq|masked_bias)$")
"""Tensors that old checkpoints hold and that follow from the config."""
_LM_HEAD = "lm_head.weight"
_ROWS = 1024


@runtime_checkable
class LazyTensors(Protocol):
    """Tensors by name of which a part can be read, such as `interop.Weights`."""

    def names(self) -> list[str]:
        """Every name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """The type of a tensor, without reading it."""
        ...

    def view(self, name: str) -> Sliceable:
        """A tensor, of which nothing need be read before a box of it is asked for."""
        ...

    def where(self, name: str) -> str:
        """The file it lies in, for error messages."""
        ...


def load_params(
    model: Model,
    rules: Mapping[str, Rule],
    weights: Mapping[str, np.ndarray] | LazyTensors,
    mapper: AbstractMapper,
    layers: Sequence[int] | None = None,
    source: str = "checkpoint",
) -> Params:
    """Read a checkpoint straight into device shards.

    The host holds a shard of one tensor at a time (one tensor and a shard, where ``weights`` cannot read less): layers
    are stacked on the devices.

    Args:
        model: Whose parameters, of which shape and type.
        rules: Our parameter's path -> what it is called in the checkpoint.
        weights: Tensors by name, as `LazyTensors` or held in memory.
        mapper: Where each shard goes.
        layers: The checkpoint's layers to take, in order (default: all).
        source: The checkpoint, for error messages.

    Raises:
        UserError: A tensor is missing, has another shape or no floating type, or belongs to no parameter (but for those
            that are known to be harmless). Names file and tensor.
    """
    tensors = weights if isinstance(weights, LazyTensors) else _Held(weights, source)
    leaves, tree = jax.tree_util.tree_flatten_with_path(model.abstract)
    names, kinds = [path_name(path) for path, _ in leaves], [leaf for _, leaf in leaves]
    shardings = jax.tree.leaves(mapper.shardings(model.specs(mapper.layout)))
    stacked = [i for i, name in enumerate(names) if rules[name].stacked]
    numbers = range(kinds[stacked[0]].shape[0] if stacked else 0) if layers is None else layers
    assert all(kinds[i].shape[0] == len(numbers) for i in stacked), (layers, [kinds[i].shape for i in stacked])
    check_tensors(dict(zip(names, kinds, strict=True)), rules, tensors, numbers, layers is not None, source)

    def place(i: int, number: int | None) -> jax.Array:
        """Parameter ``i`` on its devices, or layer ``number`` of it as ``[1, ...]``."""
        rule, kind = rules[names[i]], kinds[i]
        tensor = tensors.view(rule.name.format(number))
        if number is None:
            return _on_devices(kind.shape, shardings[i], lambda box: rule.read(tensor, box, kind.shape, kind.dtype))
        shape = kind.shape[1:]
        return _on_devices(
            (1, *shape), shardings[i], lambda box: rule.read(tensor, box[1:], shape, kind.dtype)[np.newaxis]
        )

    found: list[Any] = [None if rules[name].stacked else place(i, None) for i, name in enumerate(names)]
    if stacked:
        begin, put = _stacking(tuple((kinds[i].shape, kinds[i].dtype, shardings[i]) for i in stacked))
        stacks = begin()
        for position, number in enumerate(numbers):
            stacks = put(stacks, [place(i, number) for i in stacked], position)
        for i, stack in zip(stacked, stacks, strict=True):
            found[i] = stack
    return jax.tree.unflatten(tree, found)


def _on_devices(shape: tuple[int, ...], sharding: Any, read: Callable[[Box], np.ndarray]) -> jax.Array:
    """A global array of which this process reads and places its shards one by one, and what several hold once."""
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, devices in holders.items():
        shard = read(tuple(slice(*bound) for bound in bounds))
        # Without a copy, a CPU device would keep the host's memory. JAX lets go of it soon after the transfer, which is
        # waited for: otherwise shards would be read faster than they leave.
        arrays += jax.block_until_ready([jax.device_put(shard, device, may_alias=False) for device in devices])
        del shard
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@lru_cache(maxsize=16)
def _stacking(kinds: tuple[tuple[tuple[int, ...], Any, Any], ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Programs that make empty stacks of layers, and that put one layer of each in its place, in the stacks' memory."""
    shardings = [sharding for *_, sharding in kinds]

    def begin() -> list[jax.Array]:
        return [jnp.zeros(shape, dtype) for shape, dtype, _ in kinds]

    def put(stacks: list[jax.Array], layers: list[jax.Array], position: jax.Array) -> list[jax.Array]:
        return [
            jax.lax.dynamic_update_slice_in_dim(stack, layer, position, 0)
            for stack, layer in zip(stacks, layers, strict=True)
        ]

    return jax.jit(begin, out_shardings=shardings), jax.jit(put, out_shardings=shardings, donate_argnums=0)


# ---- what is wrong with a checkpoint --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """Tensors in memory as `LazyTensors`."""

    weights: Mapping[str, np.ndarray]
    source: str

    def names(self) -> list[str]:
        return list(self.weights)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.weights[name].dtype

    def view(self, name: str) -> Sliceable:
        return self.weights[name]

    def where(self, name: str) -> str:
        return self.source


def check_tensors(
    kinds: Mapping[str, jax.ShapeDtypeStruct],
    rules: Mapping[str, Rule],
    tensors: LazyTensors,
    numbers: Sequence[int],
    some_layers: bool,
    source: str,
) -> None:
    """Hold names, shapes and types of a checkpoint against a model's parameters, before anything is read.

    ``some_layers``: that the checkpoint has more layers than ``numbers`` is then no mistake. Raises `UserError`.
    """
    present, known = set(tensors.names()), set()
    for path, kind in kinds.items():
        rule = rules[path]
        shape = rule.theirs(kind.shape[1:] if rule.stacked else kind.shape)
        for name in [rule.name.format(i) for i in numbers] if rule.stacked else [rule.name]:
            if name not in present:
                raise UserError(
                    f"{source}: the tensor {name!r} is missing, expected with shape {shape}. The checkpoint is "
                    f"incomplete, or its config belongs to another model: fetch both again."
                )
            if (found := tuple(tensors.shape(name))) != shape:
                raise UserError(
                    f"{tensors.where(name)}: tensor {name!r} has shape {found}, expected {shape} from the config. "
                    f"They belong to different models: fetch both from one release."
                )
            if not jnp.issubdtype(tensors.dtype(name), jnp.floating):
                raise UserError(
                    f"{tensors.where(name)}: tensor {name!r} holds {tensors.dtype(name)}, expected floating numbers. "
                    f"Quantised weights are not read: take the model as it was published."
                )
            known.add(name)
    patterns = [re.escape(rule.name).replace(r"\{\}", r"\d+") for rule in rules.values() if rule.stacked]
    of_any_layer = re.compile("|".join(patterns))
    for name in tensors.names():
        if name in known or HARMLESS.search(name) or (some_layers and of_any_layer.fullmatch(name)):
            continue
        if name == _LM_HEAD and "embed" in rules:
            _check_repeats(tensors, name, rules["embed"].name)
            continue
        raise UserError(
            f"{tensors.where(name)}: holds tensor {name!r} {tuple(tensors.shape(name))}, which belongs to no parameter "
            f"of this model; without it, the model would be another one. Its config belongs to another model, or it "
            f"has parts that are not supported."
        )


def _check_repeats(tensors: LazyTensors, name: str, embedding: str) -> None:
    """A tied model may hold its unembedding once more, as long as it is the embedding."""
    shape, other = tensors.shape(name), tensors.shape(embedding)
    if shape == other:
        one, two = tensors.view(name), tensors.view(embedding)
        whole = [slice(0, n) for n in shape[1:]]
        rows = [slice(begin, min(begin + _ROWS, shape[0])) for begin in range(0, shape[0], _ROWS)]
        if all(np.array_equal(one[(r, *whole)], two[(r, *whole)]) for r in rows):
            return
    raise UserError(
        f"{tensors.where(name)}: holds tensor {name!r} {shape}, which differs from {embedding!r} {other}, but "
        f"tie_word_embeddings: true in the config makes them one. Set it to false if it was trained untied."
    )


# ---- the way out ----------------------------------------------------------------------------------------------------


def export_params(params: Params, rules: Mapping[str, Rule]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield ``(checkpoint name, array)`` for every tensor, gathering one tensor at a time to the host.

    The parts of a tensor that several parameters share are joined.
    """
    sharing: dict[str, list[tuple[Rule, Any]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        rule = rules[path_name(path)]
        sharing.setdefault(rule.name, []).append((rule, leaf))
    for name, members in sharing.items():
        members.sort(key=lambda member: 0 if member[0].part is None else member[0].part.start)
        _check_parts([rule for rule, _ in members])
        if members[0][0].stacked:
            for number in range(members[0][1].shape[0]):
                yield name.format(number), _joined([(rule, leaf[number]) for rule, leaf in members])
        else:
            yield name, _joined(members)


def _joined(members: Sequence[tuple[Rule, Any]]) -> np.ndarray:
    parts = [rule.turn.outwards(fetch(leaf)) for rule, leaf in members]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_parts(rules: Sequence[Rule]) -> None:
    if len(rules) == 1 and rules[0].part is None:
        return
    row = 0
    for rule in rules:
        assert rule.part is not None and rule.part.start == row, f"{rule.name}: no one rule has the rows from {row} on"
        row = rule.part.stop
        total = rule.part.total
    assert row == total, f"{rules[0].name}: no rule has the rows {row} to {total}"
