"""Files that are cut, flipped and made up: every one a `UserError` or a `BadRecord`, and never another exception."""

import json
import random

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from test_encode import SMOLLM2, TALK, make
from test_sources import ROWS, values, write

from spmd_distill.data import BadRecord, Intake, make_encoder, open_source
from spmd_distill.errors import UserError

SUFFIXES = [".jsonl", ".jsonl.gz", ".parquet", ".arrayrecord", ".txt"]


def damaged(data: bytes, seed: int) -> bytes:
    """Cut, or with some bytes changed, doubled or taken out."""
    rng = random.Random(seed)
    kind = rng.randrange(5)
    at = rng.randrange(len(data)) if rng.random() < 0.7 else len(data) - 1 - rng.randrange(min(200, len(data)))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at + rng.randrange(40) :]
    if kind == 3:
        return data[:at] + data[at // 2 :]
    return rng.randbytes(rng.randrange(2000))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damage_is_named_and_never_another_exception(tmp_path, suffix):
    path = write(tmp_path / f"a{suffix}", ROWS * 3)
    whole = path.read_bytes()
    encode = make_encoder(make(SMOLLM2))
    errors = 0
    for seed in range(60):
        path.write_bytes(damaged(whole, seed))
        try:
            source = open_source(path)
            length = len(source)
        except UserError as error:
            assert f"a{suffix}" in str(error)
            errors += 1
            continue
        for index in range(length):
            try:
                encode(source[index])
            except BadRecord as error:
                assert error.where.startswith(f"a{suffix}")
                errors += 1
    assert errors > 10


def test_a_wrong_record_is_named_whatever_it_holds(tmp_path):
    rng = random.Random(0)
    leaves = [None, True, 3, -0.5, "", "text", "\ud800", [], {}, [{}], ["x"], TALK, TALK[:1], {"role": "user"}]
    keys = ["text", "prompt", "completion", "messages", "role", "content", "x"]

    def value(depth: int):
        if depth == 0 or rng.random() < 0.5:
            return rng.choice(leaves)
        if rng.random() < 0.5:
            return [value(depth - 1) for _ in range(rng.randrange(3))]
        return {rng.choice(keys): value(depth - 1) for _ in range(rng.randrange(4))}

    def record():
        sound = rng.choice([{"messages": TALK}, {"prompt": "x", "completion": "y"}, {"text": "x"}])
        return sound if rng.random() < 0.1 else sound | {rng.choice(keys): value(2) for _ in range(2)}

    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record()) + "\n" for _ in range(400)))
    good = 0
    for loss in ("all", "completion", "assistant"):
        intake = Intake(open_source(path), make_encoder(make(SMOLLM2), loss=loss, max_tokens=30), on_bad="skip")
        good += len(list(intake))
        report = intake.report()
        assert report.records == 400 == report.examples + sum(report.bad.values())
        assert not any(len(reason) > 40 for reason in report.bad), report.bad
    assert good > 30


def test_files_that_are_cut_are_refused_as_a_whole(tmp_path):
    for suffix, message in ((".parquet", "not a whole Parquet file"), (".arrayrecord", "not a whole ArrayRecord file")):
        path = write(tmp_path / f"a{suffix}")
        data = path.read_bytes()
        for cut in (0, 1, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:cut])
            with pytest.raises(UserError, match=f"a{suffix}: is {message}"):
                len(open_source(path))
    path = write(tmp_path / "a.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"a.jsonl.gz: is not a whole gzip file"):
        len(open_source(path))


def test_a_damaged_row_group_leaves_the_others(tmp_path):
    path = write(tmp_path / "a.parquet", [{"text": f"{i} " * 50} for i in range(6)])
    data = bytearray(path.read_bytes())
    data[20:60] = b"\xff" * 40  # in the first of three
    path.write_bytes(data)
    source = open_source(path)
    with pytest.raises(BadRecord, match=r"a.parquet, row 2: damaged: its row group 0 cannot be read"):
        source[1]
    assert [source[i].value["text"][0] for i in range(2, 6)] == list("2345")


def test_one_changed_letter_of_a_parquet_file_with_checksums_is_seen(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["the cat sat on the mat"]})
    pq.write_table(
        table, path, compression="none", use_dictionary=False, write_page_checksum=True, write_statistics=False
    )
    data = path.read_bytes()
    assert data.count(b"the cat") == 1
    path.write_bytes(data.replace(b"the cat", b"the bat"))
    with pytest.raises(BadRecord, match=r"a.parquet, row 1: damaged: .*CRC"):
        open_source(path)[0]


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    source = open_source(path)
    assert len(source) == 3
    with path.open("r+b") as file:
        file.truncate(10)
    with pytest.raises(BadRecord, match=r"a.jsonl, line 1: the file has become shorter since it was opened"):
        source[0]
    path.unlink()
    gone = open_source(write(path))
    path.unlink()
    with pytest.raises(UserError, match=r"a.jsonl: no such file"):
        len(gone)
    with pytest.raises(UserError, match=r"a.jsonl: no such file"):
        gone.fingerprint()


class Bucket(MemoryFileSystem):
    """A store behind an address, in memory."""

    protocol = ("s3",)
    store = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + str(path).removeprefix("s3://").strip("/")


def test_files_behind_an_address_are_read_lazily(tmp_path, monkeypatch):
    monkeypatch.setattr(Bucket, "store", {})
    fsspec.register_implementation("s3", Bucket, clobber=True)
    bucket = fsspec.filesystem("s3")
    for suffix in (".jsonl", ".jsonl.gz", ".parquet"):
        path = write(tmp_path / f"a{suffix}")
        source = open_source(f"s3://bucket/folder/a{suffix}")  # nothing is there yet, and nobody has asked
        with pytest.raises(UserError, match=f"s3://bucket/folder/a{suffix}: no such file; check the address"):
            len(source)
        bucket.pipe(f"/bucket/folder/a{suffix}", path.read_bytes())
        assert values(source) == ROWS and source.name == "a" and len(source.fingerprint()) == 64
    bucket.pipe("/bucket/folder/notes.md", b"")
    folder = open_source("s3://bucket/folder")
    assert folder.name == "folder" and values(folder) == ROWS * 3
    assert folder[0].where == "folder/a.jsonl, line 1"
    assert values(open_source("s3://bucket/fol*/*.jsonl")) == ROWS
    with pytest.raises(UserError, match="patterns with \\*\\* are searched on this machine alone"):
        open_source("s3://bucket/**/*.jsonl")
    with pytest.raises(UserError, match="s3://bucket/nothing: no such file or folder; check the address"):
        open_source("s3://bucket/nothing")


def test_data_sets_of_the_datasets_library(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"text": "a", "n": None}, {"text": None, "n": 2}])
    rows.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict({"a": rows, "b": rows}).save_to_disk(tmp_path / "named")
    source = open_source(tmp_path / "plain")
    assert source.name == "plain" and values(source) == [{"text": "a"}, {"n": 2}]
    assert source[1].where == "plain, row 2" and source.fingerprint() == open_source(tmp_path / "plain").fingerprint()
    assert len(open_source(tmp_path / "splits")) == 2 and len(open_source(tmp_path / "splits" / "test")) == 1
    with pytest.raises(UserError, match=r"holds the splits a, b. Name one, such as .*named/a\."):
        len(open_source(tmp_path / "named"))
    next((tmp_path / "plain").glob("*.arrow")).write_bytes(b"nothing")
    with pytest.raises(UserError, match="plain: the datasets library cannot load it"):
        len(open_source(tmp_path / "plain"))
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or rows)
    for name in ("hf://squad", "hf://me/data:test", "hf://me/data/config:a"):
        assert len(open_source(name)) == 2
    assert asked == [
        (("squad", None), {"split": None}),
        (("me/data", None), {"split": "test"}),
        (("me/data", "config"), {"split": "a"}),
    ]
    assert open_source("hf://me/data:test").name == "data"
