"""Documents: what is read, what is refused, and that held-out text is never seen in training."""

import importlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from spmd_distill.data import Document, demo_documents, pydoc_topics, read_documents, split_documents
from spmd_distill.data.demo import HELD_OUT_PLAYS
from spmd_distill.data.text import _paragraphs
from spmd_distill.errors import UserError


@dataclass
class Assets:
    shakespeare: Path


def shared_paragraphs(train: list[Document], held_out: list[Document]) -> set[str]:
    """Paragraphs too long to be repeated by chance that stand on both sides."""
    one, other = ({p for d in side for p in _paragraphs(d.text) if len(p) >= 80} for side in (train, held_out))
    return one & other


def test_files_and_folders_are_read_in_order_with_names_free_of_machine_paths(tmp_path):
    plays = tmp_path / "plays"
    plays.mkdir()
    (plays / "b.txt").write_text("second")
    (plays / "a.txt").write_bytes(b"\xef\xbb\xbffirst\r\nline \xc3\xa9\r")
    (plays / "notes.md").write_text("not text of the folder")
    (tmp_path / "c.txt").write_text("third")
    documents = read_documents([plays, str(tmp_path / "c.txt")])
    assert documents == [
        Document("plays/a.txt", "first\nline é\n"),
        Document("plays/b.txt", "second"),
        Document("c.txt", "third"),
    ]
    assert read_documents(plays) == documents[:2]


def test_what_cannot_be_read_is_refused(tmp_path):
    def refused(message, *paths):
        with pytest.raises(UserError, match=message):
            read_documents(paths)

    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "folder").mkdir()
    refused("no text was given")
    refused("missing.txt: no such file or folder", tmp_path / "good.txt", tmp_path / "missing.txt")
    refused(r"empty.txt: the file holds no text \(2 bytes\)", tmp_path / "empty.txt")
    refused("latin.txt: not UTF-8 at byte offset 3 .0xe9", tmp_path / "latin.txt")
    refused("rows.jsonl: found file type .jsonl, expected .txt", tmp_path / "rows.jsonl")
    refused("folder: found no .txt file", tmp_path / "folder")
    refused("good.txt: given twice", tmp_path / "good.txt", tmp_path / "folder" / ".." / "good.txt")


def test_pydoc_topics_are_plenty_and_hold_no_page_twice():
    documents = pydoc_topics()
    names = [document.name for document in documents]
    assert names == sorted(set(names)) and "pydoc/compound" in names
    assert "pydoc/while" not in names, "it is a part of pydoc/compound"
    assert sum(len(document.text) for document in documents) > 300_000


def test_a_python_without_its_reference_pages_is_told_so(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"no `pydoc_data.topics`"):
        pydoc_topics()


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5])
def test_a_split_is_by_whole_documents_and_leaks_nothing(fraction):
    documents = pydoc_topics()
    train, held_out = split_documents(documents, fraction)
    assert sorted(train + held_out, key=lambda d: d.name) == documents
    assert not shared_paragraphs(train, held_out)
    share = sum(len(d.text) for d in held_out) / sum(len(d.text) for d in documents)
    assert fraction / 2 < share <= fraction
    shuffled = split_documents(documents[::-1], fraction)
    assert {d.name for d in shuffled[1]} == {d.name for d in held_out}


def test_documents_that_share_a_paragraph_stay_together():
    copied = "This paragraph was copied from one document into the other, as happens all the time on the web."
    documents = [Document(f"{i}.txt", f"Document {i}.\n\n" + copied * (i in (3, 8))) for i in range(10)]
    for fraction in (0.1, 0.3, 0.5, 0.9):
        train, held_out = split_documents(documents, fraction)
        assert train and held_out and not shared_paragraphs(train, held_out)


def test_a_split_that_cannot_be_is_refused():
    with pytest.raises(UserError, match=r"1 document\(s\) cannot be split"):
        split_documents([Document("a", "text")], 0.1)
    with pytest.raises(UserError, match="held-out fraction: found 0"):
        split_documents([Document("a", "text"), Document("b", "other")], 0)
    train, held_out = split_documents([Document("a", "long text"), Document("b", "short")], 0.01)
    assert [d.name for d in train] == ["a"] and [d.name for d in held_out] == ["b"]


def test_the_demo_holds_out_whole_plays_and_whole_pages(tmp_path):
    for name in (*HELD_OUT_PLAYS, "macbeth", "sonnets"):
        (tmp_path / f"{name}_gut.txt").write_text(f"{name.upper()}\n\nby William Shakespeare")
    train, held_out = demo_documents(Assets(tmp_path))
    plays = {d.name for d in train if d.name.startswith("shakespeare/")}
    assert plays == {"shakespeare/macbeth", "shakespeare/sonnets"}
    held_out_plays = {d.name for d in held_out if d.name.startswith("shakespeare/")}
    assert held_out_plays == {f"shakespeare/{name}" for name in HELD_OUT_PLAYS}
    assert len(train) + len(held_out) == 6 + len(pydoc_topics())
    assert not shared_paragraphs(train, held_out)


def test_the_demo_notices_a_missing_held_out_play(tmp_path):
    (tmp_path / "macbeth_gut.txt").write_text("MACBETH")
    with pytest.raises(UserError, match=r"but not shakespeare/as_you_like_it, .*tempest, which are held out"):
        demo_documents(Assets(tmp_path))
