"""Tokenizers of GGUF files: the rules by which text is split, and SentencePiece against its own algorithm."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from llama_files import write_gguf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from spmd_distill.errors import UserError
from spmd_distill.interop import open_gguf, tokenizer_from_folder, tokenizer_from_gguf

CORPUS = [
    "the cat sat on the mat, and the dog sat in the fog; it's a cat's life isn't it",
    "in 1984 the year 1984 was 1984, and 12345 came after 1984",
    "THE HttpRequest said: CamelCase and snake_case == 10\n\n    return x\n",
    "naïve café, straße, 東京タワー, 🙂🙃, здравствуй мир",
] * 4
TEXTS = [
    "the cat sat",
    "  two  spaces   three    four",
    "in 1984, 12345 and 1234567890 ½²٣",
    "I'm we'Re DON'T he'll they'd o'clock 'twas",
    "line\n\n\n  indented\r\n\ttab \n",
    "trailing   ",
    "東京タワー 日本 здравствуй мир naïve cafe\u0301 𝓂𝒶𝓉𝒽",
    "🙂🙃👍🏽 👨\u200d👩\u200d👧 \u200b\ufeff",
    "HTTPServer getURL iPhone ÉCOLE Ǆungla path/to//file.py --flag=x !!!\n\n???",
    "<s> </s> <|start|> ▁under▁ <0x0A>",
    "",
    " ",
    "\n",
]


# ---- rules of byte-level BPE ------------------------------------------------------------


@pytest.fixture(scope="module")
def bytelevel() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE, trained without any splitting so that merges cross what rules cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, special_tokens=["<|start|>", "<|end|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocab = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocab, key=vocab.__getitem__), [" ".join(merge) for merge in merges]


@pytest.fixture
def ruled(bytelevel, tmp_path):
    def make(rule: str, architecture: str = "llama", **changes):
        tokens, merges = bytelevel
        pairs = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": rule,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
        }
        pairs |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        path = write_gguf(tmp_path / "t.gguf", {"x": np.zeros((1, 4), np.float32)}, pairs, architecture=architecture)
        return tokenizer_from_gguf(open_gguf(path))

    return make


def pieces_of(tokenizer, text: str, folder) -> list[str]:
    """What the merges see, as text again."""
    tokenizer.save(folder)
    splitter = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    spelled = {chr(c): c for c in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    spelled |= {chr(256 + i): c for i, c in enumerate(c for c in range(256) if chr(c) not in spelled)}
    return [bytes(spelled[c] for c in piece).decode() for piece, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("gpt-2", "in 12345 we'Re  it's\n\nx", ["in", " 12345", " we", "'", "Re", " ", " it", "'s", "\n", "\n", "x"]),
        ("smollm", "in 12345", ["in", " ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "in 12345 we'Re  it's\n\n", ["in", " ", "123", "45", " we", "'Re", " ", " it", "'s", "\n\n"]),
        ("llama-bpe", "a==b!\n\n  (c)", ["a", "==", "b", "!\n\n", " ", " (", "c", ")"]),
        ("dbrx", "x12345\ty", ["x", "123", "45", "\ty"]),
        ("qwen2", "in 12345 we'Re", ["in", " ", "1", "2", "3", "4", "5", " we", "'Re"]),
        ("qwen2", "end.\r\n\r\nnext  \n", ["end", ".\r\n\r\n", "next", "  \n"]),
        ("tekken", "HTTPServer iPhone we're", ["HTTPServer", " i", "Phone", " we", "'re"]),
        ("tekken", "path//x/\n1234", ["path", "//", "x", "/\n", "1", "2", "3", "4"]),
    ],
)  # fmt: skip
def test_a_rule_by_hand(rule, text, expected, ruled, tmp_path):
    assert pieces_of(ruled(rule), text, tmp_path) == expected


@pytest.mark.parametrize(
    "rule", ["default", "gpt-2", "smollm", "llama-bpe", "llama3", "llama-v3", "dbrx", "qwen2", "tekken"]
)
def test_text_survives_every_rule_and_the_folder_is_the_same_tokenizer(rule, ruled, tmp_path):
    tokenizer = ruled(rule)
    tokenizer.save(tmp_path)
    again = tokenizer_from_folder(tmp_path)
    for text in TEXTS:
        composed = normalizers.NFC().normalize_str(text) if rule == "qwen2" else text
        assert tokenizer.decode(tokenizer.encode(text)) == composed
        assert np.array_equal(again.encode(text), tokenizer.encode(text))
    assert again.fingerprint() == tokenizer.fingerprint()


def test_a_piece_that_is_a_token_is_not_merged(ruled, bytelevel):
    """Llama 3 has tokens that its merges do not reach."""
    tokens, merges = bytelevel
    changes = {"tokens": [*tokens, "zqzq"], "token_type": [3, 3] + [1] * (len(tokens) - 1), "merges": merges}
    number = len(tokens)
    assert ruled("llama-bpe", **changes).encode("zqzq").tolist() == [number]
    assert number not in ruled("dbrx", **changes).encode("zqzq").tolist()


@pytest.mark.parametrize(
    ("rule", "changes", "around"),
    [
        ("llama-bpe", {}, ([0], [])),
        ("tekken", {}, ([0], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("qwen2", {}, ([], [])),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
        ("gpt-2", {"add_eos_token": True}, ([], [1])),
    ],
)
def test_what_is_put_around_a_text(rule, changes, around, ruled):
    tokenizer = ruled(rule, **changes)
    bare = tokenizer.encode("the cat").tolist()
    assert tokenizer.encode("the cat", add_special_tokens=True).tolist() == [*around[0], *bare, *around[1]]


@pytest.mark.parametrize("rule", ["llama-bpe", "qwen2", "tekken", "gpt-2"])
@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_transformers_reads_the_same_tokenizer(rule, ruled, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = ruled(rule, "qwen2" if rule == "qwen2" else "llama")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    for text in TEXTS:
        if rule == "qwen2":  # they leave decomposed letters so; the model's own tokenizer.json does not
            text = normalizers.NFC().normalize_str(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist(), text


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_the_rule_of_qwen2_is_that_of_its_class(ruled, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = ruled("qwen2")
    ours.save(tmp_path)
    mine, theirs = (
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
        transformers.Qwen2Tokenizer().backend_tokenizer,
    )
    for text in TEXTS:
        normal = theirs.normalizer.normalize_str(text)
        assert mine.normalizer.normalize_str(text) == normal
        assert mine.pre_tokenizer.pre_tokenize_str(normal) == theirs.pre_tokenizer.pre_tokenize_str(normal)


# ---- SentencePiece ----------------------------------------------------------------------

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    """Characters and what was merged from them, in the order of merging, as a trained SentencePiece model has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.train_from_iterator(
        [f" {text}" for text in CORPUS], trainers.BpeTrainer(vocab_size=400, show_progress=False, max_token_length=8)
    )
    merged = ["".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    characters = [token for token in tokenizer.get_vocab() if token not in merged]
    return list(dict.fromkeys(merged)) + sorted(characters)


@pytest.fixture
def scored(pieces, tmp_path):
    def make(architecture: str = "llama", whole=(), drop=(), **changes):
        tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces, *whole]
        kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4] * len(whole)
        scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1000.0] * len(whole)
        pairs = {
            "model": "llama",
            "pre": "default",
            "tokens": tokens,
            "scores": scores,
            "token_type": kinds,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
            **changes,
        }
        for key in drop:
            del pairs[key]
        pairs = {f"tokenizer.ggml.{key}": value for key, value in pairs.items()}
        path = write_gguf(tmp_path / "t.gguf", {"x": np.zeros((1, 4), np.float32)}, pairs, architecture=architecture)
        return tokenizer_from_gguf(open_gguf(path))

    return make


def by_hand(pieces: list[str], text: str) -> list[int]:
    """SentencePiece's BPE: of all neighbours that make a piece merge those of the best score, the leftmost first."""
    rank = {piece: number for number, piece in enumerate(pieces)}
    symbols = list(text.replace(" ", "▁"))
    while found := [(rank[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in rank]:
        at = min(found)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        ids += [259 + rank[symbol]] if symbol in rank else [3 + byte for byte in symbol.encode()]
    return ids


def random_text(seed: int) -> str:
    rng = random.Random(seed)
    words = [word for text in CORPUS for word in text.split(" ")]
    parts = [rng.choice([rng.choice(words), "".join(rng.choices("theca  1984\nï東🙂x", k=5))]) for _ in range(12)]
    return "".join(part + rng.choice(["", " ", "  "]) for part in parts)


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "plain"])
def test_ids_are_those_of_the_algorithm(prefix, scored, pieces):
    tokenizer = scored(add_space_prefix=prefix)
    texts = TEXTS + [random_text(seed) for seed in range(60)]
    used = set()
    for text in texts:
        if "<s>" in text:
            continue  # control tokens are found first; see below
        ids = tokenizer.encode(text).tolist()
        assert ids == (by_hand(pieces, " " * prefix + text) if text else []), text
        assert tokenizer.decode(ids) == text
        used |= set(ids)
    assert len(used) > 150 and min(used) < 259  # most of the pieces, and bytes


def test_control_tokens_are_found_first_and_each_part_has_its_own_prefix(scored, pieces):
    tokenizer = scored()
    cat = by_hand(pieces, " the cat")
    assert tokenizer.encode("the cat</s>the cat").tolist() == [*cat, 2, *cat]
    assert tokenizer.encode("the cat", add_special_tokens=True).tolist() == [1, *cat]  # as llama.cpp, unless told
    assert scored(add_bos_token=False).encode("the cat", add_special_tokens=True).tolist() == cat
    assert scored(add_eos_token=True).encode("the cat", add_special_tokens=True).tolist() == [1, *cat, 2]


def test_user_defined_tokens_are_whole(scored, pieces):
    tokenizer = scored("gemma2", whole=["   ", "<table>"], add_space_prefix=False)
    first = 259 + len(pieces)
    assert tokenizer.encode("the   cat<table>1").tolist() == [
        *by_hand(pieces, "the"), first, *by_hand(pieces, "cat"), first + 1, *by_hand(pieces, "1")
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("the   cat <table>")) == "the   cat <table>"
    assert set(tokenizer.special_tokens) == {"<s>", "</s>"}


def test_letters_never_make_a_byte_or_a_control_token(scored, pieces):
    """Though their halves are tokens, and their scores better."""
    halves = ["<0x", "0A>", "0x", "A>", "</", "s>", *(letter for letter in "<0xA>/s" if letter not in pieces)]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces, *halves]
    kinds = [2, 1, 3] + [6] * 256 + [1] * (len(pieces) + len(halves))  # "<s>" as an ordinary one, to see the other
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(halves))]
    tokenizer = scored(tokens=tokens, token_type=kinds, scores=scores)
    assert tokenizer.encode("<0x0A>").tolist() == by_hand([*pieces, *halves], " <0x0A>")
    assert 3 + 0x0A not in tokenizer.encode("<0x0A>") and 1 in tokenizer.encode("x<s>")


def test_control_tokens_of_phi_3_take_the_space_after_them(scored, pieces):
    tokenizer = scored("phi3")
    assert tokenizer.encode("</s>\n the").tolist() == [2, *by_hand(pieces, " the")]
    assert tokenizer.encode("<s>\n the").tolist() == [1, *by_hand(pieces, " \n the")]
    assert scored("llama").encode("</s>\n the").tolist() == [2, *by_hand(pieces, " \n the")]


def test_without_bytes_there_is_the_unknown_token(scored, pieces):
    changes = {"tokens": ["<unk>", "<s>", "</s>", *pieces], "token_type": [2, 3, 3] + [1] * len(pieces)}
    changes |= {"scores": [0.0] * 3 + [-float(rank) for rank in range(len(pieces))]}
    tokenizer = scored(**changes)
    assert tokenizer.encode("the\x07\x08cat").tolist().count(0) == 1  # a run of unknown characters is one
    assert scored(**changes, drop=["unknown_token_id"]).encode("\x07").tolist()[-1] == 0  # its kind says so


def test_a_saved_one_is_the_same(scored, tmp_path):
    tokenizer = scored()
    tokenizer.save(tmp_path)
    again = tokenizer_from_folder(tmp_path)
    assert again.fingerprint() == tokenizer.fingerprint()
    for text in TEXTS:
        assert np.array_equal(again.encode(text), tokenizer.encode(text))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_transformers_reads_the_same_scores(architecture, scored, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = scored(architecture, add_space_prefix=architecture != "gemma2", padding_token_id=0)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    for text in [*TEXTS, *(random_text(seed) for seed in range(30))]:
        if "<s>" in text or (architecture == "llama" and text[:1] in (" ", "▁")):
            continue  # their Llama puts no space before a space, unlike SentencePiece and llama.cpp
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist(), text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ["scores"]}, r"'tokenizer\.ggml\.scores' is missing, expected list"),
        ({"scores": [1.0]}, r"'tokenizer\.ggml\.scores' has 1 entries for \d+ tokens"),
        ({"scores": ["a"]}, r"'tokenizer\.ggml\.scores' holds 'a', expected only float"),
        ({"token_type": [0.5]}, r"'tokenizer\.ggml\.token_type' holds 0.5, expected only int"),
        ({"tokens": [1, 2]}, r"'tokenizer\.ggml\.tokens' holds 1, expected only str"),
        ({"tokens": "abc"}, r"'tokenizer\.ggml\.tokens' is 'abc', expected list"),
        ({"model": "t5"}, r"its tokenizer is 't5', supported are 'gpt2' \(byte-level BPE\) and 'llama'"),
        ({"add_space_prefix": 1}, r"'tokenizer\.ggml\.add_space_prefix' is 1, expected bool"),
        ({"chat_template": 1, "bos_token_id": 10**6}, r"its bos token has id 1000000, expected less than"),
    ],
)
def test_it_is_refused(changes, message, scored):
    with pytest.raises(UserError, match=message) as caught:
        scored(**changes)
    assert "t.gguf: " in str(caught.value)


def test_scores_that_are_no_numbers_are_refused(scored, pieces):
    with pytest.raises(UserError, match=r"'tokenizer\.ggml\.scores' holds numbers that are not finite"):
        scored(scores=[float("nan")] * (259 + len(pieces)))


def test_a_token_of_a_million_characters_is_refused(scored):
    changes = {"tokens": ["a" * 10**6, "<unk>"], "token_type": [1, 2], "scores": [0.0, 0.0], "unknown_token_id": 1}
    with pytest.raises(UserError, match="a token has 1000000 characters, expected at most 1024"):
        scored(**changes, drop=["bos_token_id", "eos_token_id"])


def test_text_that_would_be_lost_is_refused(scored):
    changes = {"tokens": ["a", "b"], "token_type": [1, 1], "scores": [0.0, 0.0], "bos_token_id": 0, "eos_token_id": 1}
    with pytest.raises(UserError, match="lacks 256 bytes, such as '<0x00>', and an unknown token"):
        scored(**changes, drop=["unknown_token_id"])
