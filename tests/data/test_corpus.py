"""From the sources of a run file to rows: names, weights, held-out sets, and what is said of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from test_tokens import tokenizer

from spmd_distill.config import DataConfig, parse_config, to_dict
from spmd_distill.corpus import load_corpus
from spmd_distill.data import Loader, Mixture, PackedRows
from spmd_distill.errors import UserError

WORDS = ["to", "be", "or", "not", "that", "is", "the", "question"]


def words(seed: int, count: int = 30) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """``text/`` with eight documents, and ``chats.jsonl`` and ``code.jsonl`` with 60 records, some of them twice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(words(i) + "\n")
    for name, first in (("chats", 100), ("code", 200)):
        lines = [{"prompt": words(first + i % 50, 5), "completion": words(first + i % 50 + 1000, 6)} for i in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def data(*train, **settings) -> DataConfig:
    config = replace(DataConfig(), train=train, length=64, cache=None, **settings)
    config.check()
    return config


def load(config, said=None):
    return load_corpus(config, tokenizer(), 301, 4, (said if said is not None else []).append)


def texts(rows) -> set[str]:
    """The examples of rows whose examples each have one segment, by their bytes."""
    taken, found = rows.take(range(len(rows))), set()
    for tokens, segments in zip(taken.tokens, taken.segments, strict=True):
        found |= {tokens[segments == s].tobytes() for s in range(1, segments.max() + 1)}
    return found


def test_sources_are_mixed_by_weight_under_their_names(folder):
    config = parse_config(["--data.train", "[chats.jsonl, {path: code.jsonl, weight: 3, name: programs}]"]).data
    assert parse_config(["--data.train", json.dumps(to_dict(config)["train"])]).data == config
    corpus = load(replace(config, length=64, cache=None))
    assert isinstance(corpus.train, Mixture) and corpus.train.weights == (1.0, 3.0)
    assert list(corpus.train.parts) == ["chats", "programs"] == list(corpus.heldout)
    identity = Loader(corpus.train, 2, 1, seed=0).identity
    assert identity["programs.weight"] == 3.0 and identity["chats.pack"] == "first_fit"
    assert identity["chats.tokenizer"] == tokenizer().fingerprint() and len(identity["programs.text"]) == 64
    assert any(note.startswith("programs: ") and "% full" in note for note in corpus.notes)


def test_one_source_is_no_mixture(folder):
    corpus = load(data("text"))
    assert isinstance(corpus.train, PackedRows) and list(corpus.heldout) == ["text"]


def test_held_out_records_and_their_copies_are_not_trained_on(folder):
    corpus = load(data("chats.jsonl"))
    train, heldout = texts(corpus.train), texts(corpus.heldout["chats"])
    assert len(heldout) == 5 or len(heldout) == 6, "a tenth of 60 records, with copies of some"
    assert len(train) + len(heldout) == 50 and not train & heldout


def test_held_out_documents_are_whole_files_of_any_source(folder):
    (folder / "more.txt").write_text(words(77, 60))
    corpus = load(data("text", "more.txt"))
    assert set(corpus.heldout) <= {"text", "more"} and corpus.heldout
    kept = load(data("text", "more.txt", heldout=("chats.jsonl", "code.jsonl")))
    assert list(kept.heldout) == ["chats", "code"] and kept.train.valid_tokens > corpus.train.valid_tokens


def test_only_the_completion_is_learned_where_the_run_file_says_so(folder):
    everything, completions = load(data("chats.jsonl")), load(data("chats.jsonl", loss="completion"))
    assert 0 < completions.train.valid_tokens < everything.train.valid_tokens
    assert everything.train.fingerprint() != completions.train.fingerprint()


def test_limits_take_an_equal_part_of_every_source(folder):
    whole, some = load(data("text", "code.jsonl")), load(data("text", "code.jsonl", max_train_tokens=500))
    assert 150 < some.train.parts["code"].valid_tokens < 400 < whole.train.parts["code"].valid_tokens
    # passages are measured in characters, of which this tokenizer has one a token and English four
    assert 600 < some.train.parts["text"].valid_tokens < 1300


def test_bad_records_are_skipped_and_said(folder):
    with (folder / "chats.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UserError, match=r"chats\.jsonl, line 61"):
        load(data("chats.jsonl"))
    assert any("skipped 1" in note for note in load(data("chats.jsonl", on_bad="skip")).notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": ()}, r"data\.train is empty"),
        ({"train": ("a.jsonl", "a.jsonl")}, r"a\.jsonl is given twice"),
        ({"train": ("{path: a, weigh: 2}",)}, r"no source.*path and, if wanted, name and weight"),
        ({"length": 0}, r"data\.length is 0"),
        ({"prefetch": -1}, r"data\.prefetch is -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        replace(DataConfig(), **settings).check()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("[{path: a, weight: 0}]", "weight 0; expected a number above 0"),
        ("[{path: a, name: x}, {path: b, name: x}]", "both called 'x'"),
        ("[{path: a, weigh: 2}]", "weigh"),
    ],
)
def test_sources_that_make_no_sense_are_refused(flag, message):
    with pytest.raises(UserError, match=message):
        parse_config(["--data.train", flag])


def test_text_that_does_not_do_is_named(folder):
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        load(data("nowhere.jsonl"))
    (folder / "one.jsonl").write_text('{"text": "alone"}\n')
    with pytest.raises(UserError, match=r"one: its 1 record.*data\.heldout"):
        load(data("one.jsonl"))
    with pytest.raises(UserError, match=r"data\.template: gone\.jinja"):
        load(data("chats.jsonl", template="gone.jinja"))
    with pytest.raises(UserError, match=r"chats: example 0, position .*expected 0 to 9"):
        load_corpus(data("chats.jsonl"), tokenizer(), 10, 4)
