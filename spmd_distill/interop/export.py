"""Write a Hugging Face checkpoint folder that transformers loads, all of it or none of it."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from spmd_distill.errors import UserError
from spmd_distill.interop.tokenizer import TextTokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""What a tokenizer may consist of in a Hugging Face folder."""

CARD = "README.md"
"""The model card."""

MARK = "<!-- Written by spmd_distill. -->"
"""A line of every card of ours; a card without it is somebody's own, and its folder is never replaced."""

_OURS = {"config.json", "generation_config.json", "model.safetensors.index.json", CARD, *TOKENIZER_FILES}


def save_huggingface(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]],
    tokenizer: TextTokenizer | None = None,
    *,
    files: Mapping[str, bytes | Path] | None = None,
    overwrite: bool = False,
    max_shard_bytes: float = 5e9,
) -> Path:
    """Write config, weights and tokenizer in the form that ``transformers`` and the servers built on it load.

    Everything is written into a hidden folder beside ``folder``, which then takes its name, so ``folder`` is
    never half written: after a failure it is what it was before. A kill may leave the hidden
    ``.NAME.partial``, which the next export removes, and, in the instant between the two renames of a
    replacement, the old export as ``.NAME.replaced``. On many hosts, one process calls this.

    Args:
        folder: Where to write. New or empty; with ``overwrite`` it may hold an earlier export.
        config: The dict for ``config.json``. Its ``torch_dtype`` is replaced by what the weights are.
        weights: Hugging Face names and arrays, row-major ``(out, in)``. Pairs are taken one by one, and at
            most ``max_shard_bytes`` (or one array) are held at a time.
        tokenizer: Adds the two tokenizer files and the ids of its special tokens.
        files: More files of the folder by name, of those that a checkpoint consists of: their bytes, or a file to copy.
            ``generation_config.json`` and ``tokenizer.json`` among them are taken instead of those made here.
        overwrite: Replace an earlier export. A folder with any file that no export writes is never touched.
        max_shard_bytes: Weights beyond that many bytes are split into several files with an index.

    Returns:
        The folder, as an absolute path.

    Raises:
        UserError: The folder may not be replaced, there are no weights, a name comes twice, the tokenizer
            has ids beyond the configured vocabulary, or a limit of bytes that is none.
        OSError: The disk is full, say, or the folder may not be written.
    """
    target = Path(os.path.realpath(folder))
    _check_target(target, overwrite)
    if not max_shard_bytes > 0:
        raise UserError(f"{target}: max_shard_bytes is {max_shard_bytes}, expected more than 0, such as 5e9.")
    files = dict(files or {})
    assert not files.keys() - _OURS, files.keys() - _OURS
    settings = dict(config)
    if tokenizer is not None:
        _add_special_ids(settings, tokenizer, target)
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
    draft.mkdir(parents=True)
    try:
        dtype = _write_weights(draft, target, _pairs(weights), max_shard_bytes)
        settings.pop("dtype", None)
        _write_json(draft / "config.json", {**settings, "torch_dtype": dtype})
        ids = {key: settings[key] for key in _ID_KEYS if settings.get(key) is not None}
        _write_json(draft / "generation_config.json", {"_from_model_config": True, **ids})
        if tokenizer is not None and "tokenizer.json" not in files:
            tokenizer.save(draft)
        for name, content in files.items():
            (draft / name).write_bytes(content.read_bytes() if isinstance(content, Path) else content)
        for path in draft.iterdir():
            _settle(path, mode=(draft / "config.json").stat().st_mode)
        _swap(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target}: is a file, expected a new folder to export into. Give another path.")
    names = sorted(entry.name for entry in target.iterdir())
    foreign = [name for name in names if name not in _OURS and not _is_shard(name)]
    if CARD in names and MARK not in (target / CARD).read_text(encoding="utf-8", errors="replace"):
        foreign.append(CARD)
    if foreign or (names and "config.json" not in names):
        raise UserError(
            f"{target}: holds {', '.join((foreign or names)[:3])}, which no export writes; expected a new or "
            "empty folder, or an earlier export. Give another path."
        )
    if names and not overwrite:
        raise UserError(
            f"{target}: already holds an export ({len(names)} files), expected a new or empty folder. "
            "Give another path, or allow it to be replaced with overwrite=True."
        )


def _is_shard(name: str) -> bool:
    return name.startswith("model") and name.endswith(".safetensors")


def _add_special_ids(settings: dict[str, Any], tokenizer: TextTokenizer, target: Path) -> None:
    rows = settings.get("vocab_size")
    if rows is not None and tokenizer.vocab_size > rows:
        raise UserError(
            f"{target}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the config's vocab_size "
            f"is {rows}; expected it to be larger than every id. Export the tokenizer that the model was "
            "trained with."
        )
    for key, value in zip(_ID_KEYS, (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id), strict=True):
        if settings.get(key) is None:  # a config may name several ends, which a tokenizer cannot
            settings[key] = value


def _pairs(
    weights: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]],
) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(weights, Mapping):
        yield from ((str(name), array) for name, array in weights.items())
    else:
        yield from weights


def _write_weights(folder: Path, target: Path, pairs: Iterable[tuple[str, np.ndarray]], limit: float) -> str:
    """Write the shards and, for more than one, the index; return the dtype that most of the bytes have."""
    shards: list[list[str]] = []
    waiting: dict[str, np.ndarray] = {}
    seen: set[str] = set()
    bytes_of: Counter[str] = Counter()

    def flush() -> None:
        shards.append(list(waiting))
        try:
            save_file(waiting, folder / f"model-{len(shards):05d}.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(f"{target}: cannot be written: {error}") from error
        waiting.clear()

    for name, value in pairs:
        array = np.asarray(value, order="C")  # safetensors writes the memory as it lies
        if name in seen:
            raise UserError(f"{target}: tensor {name!r} was given twice, expected once. Mend the weights' name map.")
        seen.add(name)
        if waiting and sum(other.nbytes for other in waiting.values()) + array.nbytes > limit:
            flush()
        waiting[name] = array
        bytes_of[array.dtype.name] += array.nbytes
    if not seen:
        raise UserError(f"{target}: there are no weights to export, expected at least one tensor. Give the model's.")
    flush()
    if len(shards) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return bytes_of.most_common(1)[0][0]
    places = {}
    for number, names in enumerate(shards, 1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"model-{number:05d}.safetensors").rename(folder / final)
        places.update(dict.fromkeys(names, final))
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": bytes_of.total()}, "weight_map": dict(sorted(places.items()))},
    )
    return bytes_of.most_common(1)[0][0]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _settle(path: Path, mode: int) -> None:
    """Give a file the ordinary mode (safetensors writes 0600) and put it on the disk."""
    os.chmod(path, mode)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _swap(draft: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        os.replace(draft, target)  # one atomic step, also onto an empty folder
        return
    old = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    os.replace(target, old)
    try:
        os.replace(draft, target)
    except BaseException:
        os.replace(old, target)
        raise
    shutil.rmtree(old)
