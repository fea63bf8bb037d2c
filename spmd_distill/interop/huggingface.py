"""Read a Hugging Face checkpoint folder: config.json and safetensors, whole or in shards."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from spmd_distill.errors import UserError
from spmd_distill.interop.base import Entry, Weights

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_AGAIN = "The file is damaged or was not fully downloaded: fetch it again."
_CONVERT = "Load it with transformers once and call save_pretrained(folder), which writes safetensors."


def open_huggingface(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], Weights]:
    """Open a local checkpoint folder without reading a weight.

    Returns:
        The dict of ``config.json``, and the weights in their stored dtype (bfloat16 as
        ``ml_dtypes.bfloat16``). What transformers 5 writes as ``dtype`` and ``rope_parameters["rope_theta"]``
        is in the dict also under the names that every release reads, ``torch_dtype`` and ``rope_theta``.

    Raises:
        UserError: The folder or one of its files is missing, truncated or malformed; the weights are pickled
            (which can run code when read), quantised, or only the change (adapter) of another model's. Names the
            file, what was found, what was expected and the fix.
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise UserError(
            f"{folder}: is {found}, expected a checkpoint folder on this machine. Download the model and "
            "give its folder."
        )
    whole = (folder / _WHOLE).exists() or (folder / _INDEX).exists()
    if not whole:
        _refuse_other_kinds(folder)
    config = read_json(folder / "config.json")
    _refuse_quantised(folder, config)
    if "dtype" in config:
        config.setdefault("torch_dtype", config["dtype"])
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
    entries = _open_file(folder / _WHOLE) if (folder / _WHOLE).exists() else _open_shards(folder)
    return config, Weights(str(folder), entries)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `UserError` where the file is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; the folder holds {listing(path.parent)}. Give a complete checkpoint folder."
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}. Make it a readable file.") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or thousands of lists in one another
        raise UserError(f"{path}: is not valid JSON ({error}). {_AGAIN}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {type(value).__name__}, expected an object. {_AGAIN}")
    return value


def listing(folder: Path) -> str:
    """Return the first names in a folder, for error messages."""
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join([*names[:8], "..."] if len(names) > 8 else names) or "nothing"


def _refuse_other_kinds(folder: Path) -> None:
    """A folder without safetensors of a whole model: say what it is instead."""
    names = sorted(entry.name for entry in folder.iterdir())
    if "adapter_config.json" in names:
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        raise UserError(
            f"{folder}: holds only an adapter (adapter_config.json) of {base or 'another model'}, expected a whole "
            "model. Merge them with peft's merge_and_unload() and save_pretrained(folder)."
        )
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise UserError(
            f"{folder}: its weights are pickled ({', '.join(pickles[:3])}), which can run code when read; "
            f"expected {_WHOLE}. {_CONVERT}"
        )
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        raise UserError(
            f"{folder}: holds GGUF files ({', '.join(ggufs[:3])}), expected {_WHOLE}. Give the path of one of them: "
            f"{folder / ggufs[0]}."
        )
    if "config.json" in names:
        raise UserError(
            f"{folder}: holds neither {_WHOLE} nor {_INDEX}, but {listing(folder)}. "
            "Give a folder with safetensors weights."
        )


def _refuse_quantised(folder: Path, config: dict[str, Any]) -> None:
    found = config.get("quantization_config")
    for name in ("quantize_config.json", "quant_config.json"):  # of releases that did not write it into the config
        if not found and (folder / name).exists():
            found = {"quant_method": name.removesuffix(".json")}
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else None
        raise UserError(
            f"{folder}: its weights are quantised by {method or 'an unnamed method'}, expected floating numbers. "
            "Take the model as it was published before, or a GGUF file."
        )


def _open_file(path: Path) -> dict[str, Entry]:
    try:
        handle: Any = safe_open(str(path), framework="np")
        names = list(handle.keys())
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file, but {_INDEX} names it; the folder holds {listing(path.parent)}. Fetch the rest."
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(_broken(path, str(error))) from None
    return {name: _entry(path, handle, name) for name in names}


def _broken(path: Path, reason: str) -> str:
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
    fix = "It looks like a Git LFS pointer: run `git lfs pull`." if first == b"version " else _AGAIN
    return f"{path}: is not a whole safetensors file ({reason}; {size} bytes, starting with {first!r}). {fix}"


def _entry(path: Path, handle: Any, name: str) -> Entry:
    part = handle.get_slice(name)
    stored = part.get_dtype()
    if stored not in _DTYPES:
        raise UserError(
            f"{path}: tensor {name!r} is stored as {stored}, expected one of {', '.join(_DTYPES)}. {_CONVERT}"
        )
    shape = tuple(part.get_shape())
    return Entry(shape, _DTYPES[stored], _reader(path, handle, name), _viewer(path, handle, name, shape), str(path))


def _reader(path: Path, handle: Any, name: str) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        with _reading(path, name):
            return handle.get_tensor(name)

    return read


def _viewer(path: Path, handle: Any, name: str, shape: tuple[int, ...]) -> Callable[[], "_View"]:
    return lambda: _View(shape, path, name, handle)


@dataclass(frozen=True)
class _View:
    """A tensor on disk, of which the bytes of a box are read when the box is asked for."""

    shape: tuple[int, ...]
    path: Path
    name: str
    handle: Any

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        with _reading(self.path, self.name):
            return self.handle.get_slice(self.name)[box]


@contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{path}: tensor {name!r} cannot be read ({error}). {_AGAIN}") from None


def _open_shards(folder: Path) -> dict[str, Entry]:
    index = folder / _INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index}: has no 'weight_map', expected tensor name -> file name. {_AGAIN}")
    shards: dict[str, dict[str, Entry]] = {}
    entries = {}
    for name, place in places.items():
        if not isinstance(place, str) or place in ("", "..") or Path(place).name != place or not place.isprintable():
            raise UserError(f"{index}: puts tensor {name!r} in {place!r}, expected the name of a file beside it.")
        if place.endswith(_PICKLES):
            raise UserError(f"{index}: names the pickle {place}, which can run code when read. {_CONVERT}")
        if place not in shards:
            shards[place] = _open_file(folder / place)
        if name not in shards[place]:
            raise UserError(
                f"{folder / place}: holds no tensor {name!r}, but {_INDEX} says so. Fetch both from one release."
            )
        entries[name] = shards[place][name]
    return entries
