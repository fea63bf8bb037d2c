"""The manifest of a step: the size and sha256 of each of its files, written before the step is committed."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "manifest.json"
_STAMPED_AT_COMMIT = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files at the top of a step that orbax touches after the manifest; neither holds a value of the state."""
_HASH_THREADS = 8


def write_manifest(folder: Path) -> None:
    """Hash every file below ``folder`` and write the manifest, flushed to the disk."""
    skip = {folder / name for name in _STAMPED_AT_COMMIT}
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path not in skip)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, _hash_all(paths), strict=True)
    }
    with (folder / MANIFEST).open("w") as file:
        json.dump({"format": 1, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def verify_step(folder: Path) -> str | None:
    """Hash every file of a step's folder against its manifest, several at a time: what is wrong with it, or None."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        if not files:
            return f"its {MANIFEST} lists no file"
        for name, expected in files.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (size := (folder / name).stat().st_size) != expected["bytes"]:
                return f"{name} has {size} bytes, expected {expected['bytes']}"
        for name, digest in zip(files, _hash_all([folder / name for name in files]), strict=True):
            if digest != files[name]["sha256"]:
                return f"{name} is not what was saved (its sha256 differs)"
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was never finished"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    return None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_all(paths: list[Path]) -> list[str]:
    with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="checkpoint-hash") as pool:
        return list(pool.map(_hash, paths))
