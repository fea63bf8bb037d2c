"""Files of every kind -> the same records; what is broken is named, and is never another exception."""

import gzip
import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from spmd_distill.data import BadRecord, open_source
from spmd_distill.errors import UserError

ROWS = [
    {"text": "naïve 🙂\n second line"},
    {"prompt": "Q: ", "completion": "A"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "東京"}], "id": 7},
]


def write(path, rows=ROWS):
    """The rows as a file of the kind that its name says, by other people's writers."""
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(b"\n".join(lines)))
    elif path.suffix == ".parquet":
        fields = sorted({key for row in rows for key in row})
        table = pa.Table.from_pylist([{key: row.get(key) for key in fields} for row in rows])
        pq.write_table(table, path, row_group_size=2)
    elif path.suffix == ".arrayrecord":
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for line in lines:
            writer.write(line)
        writer.close()
    else:
        path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def values(source):
    return [dict(source[i].value) for i in range(len(source))]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".parquet", ".arrayrecord"])
def test_every_kind_of_file_gives_the_same_records(tmp_path, suffix):
    path = write(tmp_path / f"chat{suffix}")
    source = open_source(path)
    assert source.name == "chat" and values(source) == ROWS
    assert values(pickle.loads(pickle.dumps(source))) == ROWS, "workers get a source of their own"
    print_of = source.fingerprint()
    assert print_of == open_source(path).fingerprint() and len(print_of) == 64
    assert [source[i].where for i in range(3)] == [
        f"chat{suffix}, {'line' if 'son' in suffix else 'row' if suffix == '.parquet' else 'record'} {i + 1}"
        for i in range(3)
    ]
    assert dict(source[-1].value) == ROWS[2]
    with pytest.raises(IndexError):
        source[3]
    write(path, [*ROWS[:2], {"text": "other"}])
    assert open_source(path).fingerprint() != print_of


def test_lines_are_found_as_editors_count_them(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "1"}\r\n\r\n  \t\n {"text": "4"} \n\n{"text": "6"}')
    whole = [(record.value["text"], record.where) for record in map(open_source(path).__getitem__, range(3))]
    assert whole == [("1", "a.jsonl, line 1"), ("4", "a.jsonl, line 4"), ("6", "a.jsonl, line 6")]
    for chunk in range(1, 20):  # wherever the pieces end that the file is read in
        monkeypatch.setattr("spmd_distill.data.sources.files.CHUNK", chunk)
        source = open_source(path)
        assert [(source[i].value["text"], source[i].where) for i in range(len(source))] == whole
    for blank in (b"", b"\n", b"\xef\xbb\xbf\n \n"):
        path.write_bytes(blank)
        assert len(open_source(path)) == 0


def test_text_files_folders_and_patterns(tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    write(folder / "b.jsonl", ROWS[:2])
    write(folder / "c.parquet", ROWS[2:])
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntext")
    (folder / "notes.md").write_text("not data")
    source = open_source(folder)
    assert source.name == "mixed" and values(source) == [{"text": "one\ntext"}, *ROWS]
    assert [source[i].where for i in range(4)] == [
        "mixed/a.txt",
        "mixed/b.jsonl, line 1",
        "mixed/b.jsonl, line 2",
        "mixed/c.parquet, row 1",
    ]
    assert dict(source[-1].value) == ROWS[2] and values(pickle.loads(pickle.dumps(source))) == values(source)
    with pytest.raises(IndexError):
        source[4]
    assert values(open_source(f"{tmp_path}/**/*.jsonl")) == ROWS[:2]
    assert values(open_source(folder / "*.[jp]*", name="mine")) == ROWS
    (tmp_path / "odd[1].jsonl").write_bytes((folder / "b.jsonl").read_bytes())
    assert values(open_source(tmp_path / "odd[1].jsonl")) == ROWS[:2], "a file whose name looks like a pattern"


def test_another_field_holds_the_text_or_the_messages(tmp_path):
    rows = [{"body": "x", "text": "no"}, {"body": ROWS[2]["messages"]}, {"text": "y"}]
    source = open_source(write(tmp_path / "a.jsonl", rows), field="body")
    assert source[0].value == {"text": "x"} and source[1].value == {"messages": ROWS[2]["messages"]}
    with pytest.raises(BadRecord, match=r"a.jsonl, line 3: no field 'body': found 'text'"):
        source[2]
    assert source.fingerprint() != open_source(tmp_path / "a.jsonl").fingerprint()


def test_what_is_not_there_is_refused_with_the_nearest_name(tmp_path, monkeypatch):
    def refused(message, path):
        with pytest.raises(UserError, match=message):
            len(open_source(path))

    write(tmp_path / "train.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text("a,b")
    refused(r"trian.jsonl: no such file or folder; did you mean .*/train.jsonl\?", tmp_path / "trian.jsonl")
    refused(r"did you mean .*/empty\?", tmp_path / "emptyy" / "a.jsonl")
    refused("zzz: no such file or folder; .* holds nothing of a similar name", tmp_path / "zzz")
    refused("no file matches this pattern", tmp_path / "*.parquet")
    refused("empty: holds no file at all; expected files ending in .jsonl", tmp_path / "empty")
    refused("table.csv: found file type .csv, expected .jsonl", tmp_path / "table.csv")
    refused("found an address of kind ftp://, expected gs://", "ftp://host/a.jsonl")
    refused("path of a data source is empty", "")
    refused("ArrayRecord is read from local disks alone", "gs://bucket/a.arrayrecord")
    import importlib

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    refused(r"a.parquet: .* pip install 'spmd_distill\[parquet\]'", write(tmp_path / "a.parquet"))
    refused(r"hf://squad: .* pip install 'spmd_distill\[datasets\]'", "hf://squad")


BROKEN = [
    (b'{"text": "x"', "not JSON: Expecting ',' delimiter at column 13"),
    (b"[", r"not JSON: .*; expected one object a line, `jq -c '.\[\]'`"),
    (b"[1]", "not an object: found an array"),
    (b'"text"', "not an object: found a string"),
    (b"null", "not an object: found null"),
    (b'{"text": "caf\xe9"}', "not UTF-8: found byte 0xe9 at offset 13 of the record"),
    (b"[" * 100_000, "not JSON that can be read: it is nested too deeply"),
    (b"1" * 5000, "not JSON: Exceeds the limit"),
]


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "1"}\n' + line + b'\n{"text": "3"}\n')
    writer = ArrayRecordWriter(str(tmp_path / "a.arrayrecord"), "group_size:1")
    for data in (b'{"text": "1"}', line, b'{"text": "3"}'):
        writer.write(data)
    writer.close()
    for name, unit in (("a.jsonl", "line"), ("a.arrayrecord", "record")):
        source = open_source(tmp_path / name)
        assert (source[0].value, source[2].value) == ({"text": "1"}, {"text": "3"})
        with pytest.raises(BadRecord, match=f"{name}, {unit} 2: {message}"):
            source[1]


def test_a_text_file_that_is_none(tmp_path):
    for name, data in (("latin.txt", b"caf\xe9"), ("empty.txt", b" \n")):
        (tmp_path / name).write_bytes(data)
    with pytest.raises(BadRecord, match=r"latin.txt: not UTF-8 at byte offset 3"):
        open_source(tmp_path / "latin.txt")[0]
    with pytest.raises(BadRecord, match=r"empty.txt: the file holds no text"):
        open_source(tmp_path / "empty.txt")[0]
