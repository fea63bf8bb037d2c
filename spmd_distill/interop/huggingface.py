"""Read a Hugging Face checkpoint folder: config.json and safetensors, whole or in shards."""

import json
import os
from collections.abc import Callable
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
            (which can run code when read) or quantised. Names the file, what was found, what was expected and
            the fix.
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise UserError(
            f"{folder}: is {found}, expected a checkpoint folder on this machine. Download the model and "
            "give its folder."
        )
    config = read_json(folder / "config.json")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "an unnamed method")
        raise UserError(f"{folder}: its weights are quantised by {method}, expected float weights. {_CONVERT}")
    if "dtype" in config:
        config.setdefault("torch_dtype", config["dtype"])
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
    if (folder / _WHOLE).exists():
        entries = _open_file(folder / _WHOLE)
    elif (folder / _INDEX).exists():
        entries = _open_shards(folder)
    else:
        raise UserError(_no_weights(folder))
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
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path}: is not valid JSON ({error}). {_AGAIN}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {type(value).__name__}, expected an object. {_AGAIN}")
    return value


def listing(folder: Path) -> str:
    """Return the first names in a folder, for error messages."""
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join([*names[:8], "..."] if len(names) > 8 else names) or "nothing"


def _no_weights(folder: Path) -> str:
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PICKLES)
    if pickles:
        return (
            f"{folder}: its weights are pickled ({', '.join(pickles[:3])}), which can run code when read; "
            f"expected {_WHOLE}. {_CONVERT}"
        )
    return (
        f"{folder}: holds neither {_WHOLE} nor {_INDEX}, but {listing(folder)}. Give a folder with safetensors weights."
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
    return Entry(tuple(part.get_shape()), _DTYPES[stored], _reader(path, handle, name))


def _reader(path: Path, handle: Any, name: str) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        try:
            return handle.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{path}: tensor {name!r} cannot be read ({error}). {_AGAIN}") from None

    return read


def _open_shards(folder: Path) -> dict[str, Entry]:
    index = folder / _INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index}: has no 'weight_map', expected tensor name -> file name. {_AGAIN}")
    shards: dict[str, dict[str, Entry]] = {}
    entries = {}
    for name, place in places.items():
        if not isinstance(place, str) or Path(place).name != place:
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
