"""Models of the Hugging Face hub by their id: fetched only when asked for, into the hub's own cache."""

import importlib
import re
from pathlib import Path

from spmd_distill.errors import UserError

FETCHED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "README.md")
"""What is downloaded of a repository: weights without pickles, config, tokenizer, and the card, for its licence."""
LEFT = ("*/*", "consolidated*")
"""What is not: folders with the same model in other forms."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CACHED = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")


def is_hub_id(text: str) -> bool:
    """Whether ``text`` could be the id of a model: ``owner/name``, or a bare name as the oldest have."""
    return bool(_ID.fullmatch(text)) and not text.endswith((".gguf", ".safetensors"))


def hub_id_of(folder: Path) -> str | None:
    """The id of the model whose folder in the hub's cache this is (``models--owner--name/snapshots/commit``)."""
    found = _CACHED.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return f"{found['owner']}/{found['name']}" if found else None


def fetch_from_hub(repository: str, revision: str | None = None) -> Path:
    """Download a model, or what of it is not yet in the cache, and return its folder.

    Raises `UserError` where the package ``huggingface_hub`` is not installed and where it cannot download.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError(
            f"{repository}: downloading needs the package huggingface_hub, which is not installed. "
            "Install it: pip install 'spmd_distill[hub]'"
        ) from None
    try:
        folder = hub.snapshot_download(
            repository, revision=revision, allow_patterns=list(FETCHED), ignore_patterns=list(LEFT)
        )
    except Exception as error:  # of the hub, of the connection and of the disk: they have no common type
        reason = next(iter(str(error).strip().splitlines()), "")
        raise UserError(
            f"{repository}{f' at revision {revision!r}' if revision else ''}: cannot be downloaded "
            f"({type(error).__name__}: {reason}). Check the id, the connection and, for a gated model, that you are "
            "logged in (`hf auth login`)."
        ) from error
    return Path(folder)
