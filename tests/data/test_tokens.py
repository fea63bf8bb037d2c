"""The cache of tokens: made once, verified, mended, and the same however it was made."""

import json
import os
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from spmd_distill.data import AbstractSource, BadRecord, Record, make_encoder, open_source
from spmd_distill.data.rows.table import COLUMNS
from spmd_distill.data.tokens import Settings, token_table
from spmd_distill.data.tokens.chunk import Chunk, Job
from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer

RECORDS = 40


def tokenizer(first: int = 0) -> TextTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i + first for i, c in enumerate(alphabet)} | {f"<{i}>": i for i in range(first)}
    made = Tokenizer(models.BPE(vocab=vocab | {"</s>": 300}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["</s>"])
    return TextTokenizer(made, {"eos": "</s>"})


@pytest.fixture
def source(tmp_path) -> AbstractSource:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "ab" * (i % 7 + 1) + str(i)}) + "\n" for i in range(RECORDS)))
    return open_source(file)


@pytest.fixture
def broken(tmp_path) -> AbstractSource:
    file = tmp_path / "broken.jsonl"
    lines = [json.dumps({"text": f"text {i}"}) for i in range(8)]
    lines[3], lines[5] = "{not json", '{"title": 1}'
    file.write_text("\n".join(lines))
    return open_source(file)


def equal(one, other) -> bool:
    return one.sha256 == other.sha256 and all(np.array_equal(getattr(one, n), getattr(other, n)) for n in COLUMNS)


@pytest.fixture
def encoder():
    return make_encoder(tokenizer())


def test_the_tokens_are_those_of_each_record_in_order(source, encoder, tmp_path):
    table, report = token_table(source, encoder)
    assert len(table) == report.examples == report.records == RECORDS and report.tokens == len(table.tokens)
    for index in range(RECORDS):
        expected = encoder(source[index])
        assert np.array_equal(table[index].tokens, expected.tokens)
        assert np.array_equal(table[index].loss, expected.loss)
    kept, again = token_table(source, encoder, Settings(tmp_path / "cache"))
    assert equal(kept, table) and again == report and isinstance(kept.tokens, np.memmap)


def test_a_text_is_tokenised_once(source, encoder, tmp_path, monkeypatch):
    first, report = token_table(source, encoder, Settings(tmp_path))
    monkeypatch.setattr(Job, "chunk", lambda *_: pytest.fail("tokenised again"))
    said = []
    second, same = token_table(source, encoder, Settings(tmp_path, say=said.append))
    assert equal(first, second) and same == report and not said


def test_whatever_matters_is_in_the_key(source, encoder, broken, tmp_path):
    settings = Settings(tmp_path / "cache")
    token_table(source, encoder, settings)
    token_table(broken, encoder, Settings(tmp_path / "cache", on_bad="skip"))
    token_table(source, encoder, Settings(tmp_path / "cache", limit=50))
    token_table(source, make_encoder(tokenizer(2)), settings)
    token_table(source, make_encoder(tokenizer(), max_tokens=5), settings)
    token_table(source, make_encoder(tokenizer(), add_special=False), settings)
    assert sum(path.is_dir() for path in (tmp_path / "cache").iterdir()) == 6
    with pytest.raises(BadRecord, match="line 4"):
        token_table(broken, encoder, settings)


@pytest.mark.parametrize("name", [*(f"{column}.npy" for column in COLUMNS), "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_what_is_damaged_is_made_again_and_said(name, damage, source, encoder, tmp_path):
    settings = Settings(tmp_path / "cache")
    expected, _ = token_table(source, encoder, settings)
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    data = bytearray(file.read_bytes())
    del expected
    if damage == "remove":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(data[: len(data) - 3])
    else:
        data[-9 if name.endswith("npy") else data.index(b"sha256") + 12] ^= 1
        file.write_bytes(data)
    said = []
    table, _ = token_table(source, encoder, Settings(tmp_path / "cache", say=said.append))
    assert len(said) == 1 and "texts" in said[0] and "damaged" in said[0]
    assert equal(table, token_table(source, encoder)[0])
    token_table(source, encoder, Settings(tmp_path / "cache", say=said.append))
    assert len(said) == 1


def test_an_interrupted_process_leaves_its_chunks_to_the_next_one(source, encoder, tmp_path, monkeypatch):
    made, chunk = [], Job.chunk

    def interrupted(job, first, last):
        if len(made) == 10:
            raise KeyboardInterrupt
        made.append(first)
        return chunk(job, first, last)

    monkeypatch.setattr(Job, "chunk", interrupted)
    with pytest.raises(KeyboardInterrupt):
        token_table(source, encoder, Settings(tmp_path / "cache"))
    (parts,) = (tmp_path / "cache").glob("*.parts")
    assert len(list(parts.iterdir())) == 10
    (parts / "4.npz").write_bytes(b"torn")
    before, counted = list(made), []
    monkeypatch.setattr(Job, "chunk", lambda job, first, last: counted.append(first) or chunk(job, first, last))
    table, _ = token_table(source, encoder, Settings(tmp_path / "cache"))
    assert sorted(counted) == sorted({*range(RECORDS)} - {*before} | {4})
    assert equal(table, token_table(source, encoder)[0]) and not list((tmp_path / "cache").glob("*.parts"))


def test_several_processes_make_the_same_tokens(source, broken, encoder, tmp_path):
    assert equal(token_table(source, encoder, Settings(workers=2))[0], token_table(source, encoder)[0])
    with pytest.raises(BadRecord, match="line 4"):
        token_table(broken, encoder, Settings(tmp_path, workers=2))


class Dying(AbstractSource):
    """The process that reads its third record dies, some time after its pipes are gone."""

    name = "dying"

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Record:
        if index == 2:
            os.closerange(0, 100)
            time.sleep(0.5)
            os._exit(7)
        return Record({"text": "x"}, f"record {index}")

    def fingerprint(self) -> str:
        return "dying"


def test_a_process_that_dies_is_named_with_its_exit_code(encoder):
    with pytest.raises(UserError, match=r"dying: a process that tokenises ended .* \(exit code 7\); most often memory"):
        token_table(Dying(), encoder, Settings(workers=2))


def test_a_limit_takes_records_from_all_over_the_source(source, encoder):
    table, report = token_table(source, encoder, Settings(limit=100))
    assert 100 <= len(table.tokens) < 140 and report.examples == len(table) < RECORDS
    whole = [token_table(source, encoder)[0][i].tokens.tolist() for i in range(RECORDS)]
    numbers = [whole.index(table[i].tokens.tolist()) for i in range(len(table))]
    assert numbers == sorted(numbers) and numbers[-1] > RECORDS / 2


def test_bad_records_are_counted_and_named(broken, encoder, tmp_path):
    for _ in range(2):  # made, and read
        table, report = token_table(broken, encoder, Settings(tmp_path / "cache", on_bad="skip"))
        assert len(table) == 6 and sum(report.bad.values()) == 2
        assert "line 4" in report.first[0] and "line 6" in report.first[1]


def test_nothing_to_learn_from_is_an_error(tmp_path, encoder):
    for name, text, message in (("empty", "", "holds no record"), ("bad", "{}\n{}\n", "all 2 records are bad")):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(text)
        for folder in (None, tmp_path / "cache"):
            with pytest.raises(UserError, match=message):
                token_table(open_source(file), encoder, Settings(folder, on_bad="skip"))


def test_a_folder_that_cannot_be_written_is_an_error(source, encoder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache: the tokens of texts cannot be kept.*null"):
        token_table(source, encoder, Settings(tmp_path / "file"))


def test_copies_have_one_hash(tmp_path, encoder):
    file = tmp_path / "copies.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two", "one")))
    table, _ = token_table(open_source(file), encoder)
    assert table.hashes[0] == table.hashes[2] != table.hashes[1]


class OnFire(AbstractSource):
    name = "on fire"

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise OSError("disk on fire")
        return Record({"text": "abc"}, f"record {index}")

    def fingerprint(self):
        return "0" * 64


def test_an_error_of_the_disk_is_an_error_of_the_cache(encoder, tmp_path):
    with pytest.raises(UserError, match="disk on fire"):
        token_table(OnFire(), encoder, Settings(tmp_path / "cache"))


def test_a_chunk_is_there_whole_or_not_at_all(tmp_path, source, encoder):
    chunk = Job(source, encoder, "error").chunk(3, 9)
    chunk.save(tmp_path / "a.npz")
    assert [p.name for p in tmp_path.glob("a*")] == ["a.npz"]
    again = Chunk.load(tmp_path / "a.npz")
    assert again is not None and again.report == chunk.report and again.tokens == chunk.tokens
    assert Chunk.load(tmp_path / "b.npz") is None
