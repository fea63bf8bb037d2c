"""Models of other tools in one call each way: a Hugging Face folder, a GGUF file or a hub id in, a folder out."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_distill.distributed import is_first
from spmd_distill.errors import UserError
from spmd_distill.interop import CARD, TOKENIZER_FILES, ModelCard, TextTokenizer, save_huggingface
from spmd_distill.loading import Checkpoint, Say, Source, find_source, open_checkpoint
from spmd_distill.mappers import AbstractMapper, make_mapper
from spmd_distill.models import Model, export_params
from spmd_distill.sharding import MeshLayout
from spmd_distill.types import Params

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Pretrained:
    """A model with its parameters on their devices, and what it takes to write it out again."""

    model: Model
    params: Params
    tokenizer: TextTokenizer
    family: Any
    """The module of its family: `config_to_huggingface`, `rules`."""
    huggingface_config: dict[str, Any]
    """The ``config.json`` it came with, or what a GGUF file's metadata amount to."""
    source: Source
    mapper: AbstractMapper


def load_pretrained(
    source: str | Path,
    mapper: AbstractMapper | MeshLayout | str = "single",
    *,
    param_dtype: str = "float32",
    layers: Sequence[int] | None = None,
    download: bool = False,
    revision: str | None = None,
    say: Say = lambda message: None,
) -> Pretrained:
    """Load a model, each shard of each tensor straight to the devices that hold it.

    Args:
        source: A Hugging Face folder, a GGUF file, ``demo``, or, with ``download``, a hub id such as
            ``Qwen/Qwen2.5-0.5B``.
        mapper: Where the parameters go: a mapper, a layout, or a layout's name or path (then under ``shard_map``).
        param_dtype: What they are held in: float16, bfloat16, float32 or float64.
        layers: The model's layers to take, from 0, in order; None takes all.
        download: Whether the hub may be asked for what is not on this machine.
        revision: The branch, tag or commit to download.
        say: Told about what takes long.

    Raises:
        UserError: Nothing is found under that name; a file is missing, damaged, pickled, quantised or only an adapter;
            the architecture is not known; a tensor is missing, too many, or of another shape. Names file and tensor.
    """
    checkpoint = open_checkpoint(find_source(source, download, revision, say), param_dtype, say)
    if not isinstance(mapper, AbstractMapper):
        mapper = make_mapper("shard_map", mapper)
    model = checkpoint.model if layers is None else checkpoint.of_layers(layers)
    return Pretrained(
        model,
        checkpoint.load(mapper, layers),
        checkpoint.tokenizer,
        checkpoint.family,
        checkpoint.huggingface_config,
        checkpoint.source,
        mapper,
    )


def save_pretrained(
    folder: str | os.PathLike[str],
    model: Model,
    params: Params,
    *,
    like: Pretrained | Checkpoint,
    tokenizer: TextTokenizer | None = None,
    card: ModelCard | None = None,
    max_shard_bytes: float = 5e9,
    overwrite: bool = False,
) -> Path:
    """Write a model as a Hugging Face folder that transformers and the servers built on it load, or nothing of it.

    Args:
        folder: New or empty; with ``overwrite``, it may hold an earlier export.
        model: A model of the family of ``like``.
        params: Its parameters, on any layout. Every tensor is written in the type it is held in.
        like: Where the model comes from. Its config gives what ours does not know. Of a Hugging Face folder, the files
            of the tokenizer and ``generation_config.json`` are carried over byte for byte; of a GGUF file, both are
            built.
        tokenizer: The model's own, where it is not that of ``like``: its files are then written anew, and the ids of
            special tokens are its own.
        card: What ``README.md`` says, besides what the source knows of itself.
        max_shard_bytes: Weights beyond that many bytes are split into several files with an index.
        overwrite: Replace an earlier export. A folder with any other file, and the source itself, are never touched.

    Returns:
        The folder, as an absolute path.

    Raises:
        UserError: The folder may not be replaced, or the tokenizer has ids that the model has no rows for.
    """
    target, source = Path(os.path.realpath(folder)), like.source
    if target == Path(os.path.realpath(source.path)):
        raise UserError(f"{target}: is where the model was loaded from, expected another folder. Give another path.")
    config = like.family.config_to_huggingface(model.config, like.huggingface_config)
    config.pop("auto_map", None)  # names code beside the original, which is not carried over
    files: dict[str, bytes | Path] = {} if tokenizer is not None else carried_over(source)
    if tokenizer is not None:
        config = {name: value for name, value in config.items() if not name.endswith("_token_id")}
    files[CARD] = (card or ModelCard()).render(target.name, source.repository, source.license).encode()
    tensors = export_params(params, like.family.rules(model.config))
    if not is_first():
        for _ in tensors:  # gathered from all processes, and written by one
            pass
        return target
    return save_huggingface(
        target,
        config,
        tensors,
        tokenizer or like.tokenizer,
        files=files,
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
    )


def carried_over(source: Source) -> dict[str, bytes | Path]:
    """Files that an export takes from a Hugging Face folder as they are; none from a GGUF file."""
    if not source.path.is_dir():
        return {}
    names = [name for name in (*TOKENIZER_FILES, GENERATION) if (source.path / name).is_file()]
    return {name: source.path / name for name in names}
