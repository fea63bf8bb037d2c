import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from llama_files import write_gguf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer, open_gguf, tokenizer_from_folder, tokenizer_from_gguf

SPECIALS = ["<|unk|>", "<|start|>", "<|end|>"]
ROLES = {"bos": "<|start|>", "eos": "<|end|>", "pad": "<|end|>", "unk": "<|unk|>"}
CHATML = (
    "{% for message in messages %}\n"
    "    {% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
CORPUS = [
    "in 1984 the year 1984 was 1984, and 1985 came after 1984",
    "the cat sat on the mat and the dog sat in the fog",
    "naïve café, straße, 東京, 🙂🙃",
] * 4
TEXTS = [
    "",
    " ",
    "in 1984 the dog",
    "\n\n\ttabs  and   spaces \r\n",
    "naïve café 東京 🙂 x\u0301",
    "\x00\x7f\u200b\ufeff",
    "<|start|>the cat<|end|>",
]


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """A byte-level BPE tokenizer as GPT-2's, trained here; " 1984" is one of its tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.token_to_id("Ġ1984") is not None and tokenizer.get_vocab_size() == 300
    return tokenizer


@pytest.fixture
def ours(plain) -> TextTokenizer:
    return TextTokenizer(Tokenizer.from_str(plain.to_str()), ROLES, CHATML)


@pytest.fixture
def as_gguf(plain, tmp_path):
    """Write the trained tokenizer into a GGUF file, with changed metadata, and open it."""

    def make(**changes):
        vocab = plain.get_vocab()
        tokens = sorted(vocab, key=vocab.__getitem__)
        merges = json.loads(plain.to_str())["model"]["merges"]
        pairs = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.chat_template": CHATML,
        }
        pairs |= {f"tokenizer.{key}": value for key, value in changes.items()}
        pairs = {key: value for key, value in pairs.items() if value is not None}
        path = write_gguf(tmp_path / "t.gguf", {"x": np.zeros((1, 4), np.float32)}, pairs)
        return open_gguf(path)

    return make


# ---- text and ids -----------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(text, ours):
    ids = ours.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert ours.decode(ids) == text
    assert ours.decode(ids.tolist()) == text


def test_a_batch_is_its_texts(ours):
    batch = ours.encode_batch(TEXTS)
    assert all(np.array_equal(ids, ours.encode(text)) for ids, text in zip(batch, TEXTS, strict=True))
    assert ours.encode_batch([]) == []


def test_special_tokens(ours):
    assert ours.special_tokens == {"<|unk|>": 0, "<|start|>": 1, "<|end|>": 2}
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (1, 2, 2)
    ids = ours.encode("<|start|>the cat<|end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert ours.decode(ids, skip_special_tokens=True) == "the cat"
    assert ours.vocab_size == max(ours.vocabulary.values()) + 1 == 300


def test_a_model_without_a_role_has_none(plain):
    bare = TextTokenizer(Tokenizer.from_str(plain.to_str()), {"eos": "<|end|>"})
    assert (bare.bos_id, bare.eos_id, bare.pad_id) == (None, 2, None)


def test_a_role_outside_of_the_vocabulary_is_refused(plain):
    with pytest.raises(UserError, match=r"there: its pad token '<pad>' is not in its vocabulary of 300 tokens"):
        TextTokenizer(plain, {"pad": "<pad>"}, source="there")


@pytest.mark.parametrize(("ids", "found"), [([3, 300], "id 300 at position 1"), ([-1], "id -1 at position 0")])
def test_ids_that_do_not_exist_are_not_dropped(ids, found, ours):
    with pytest.raises(UserError, match=f"cannot decode {found}, expected ids of 0 to 299"):
        ours.decode(ids)


def test_text_without_a_utf8_form_is_named(ours):
    with pytest.raises(UserError, match=r"text 1: character 2 is the lone surrogate '\\ud800'"):
        ours.encode_batch(["fine", "ab\ud800"])


def test_a_character_cut_in_its_bytes_is_replaced(ours):
    ids = ours.encode("🦜")
    assert len(ids) > 1 and ours.decode(ids[:-1]) == "\ufffd"


def test_stored_truncation_and_padding_are_switched_off(plain):
    stored = Tokenizer.from_str(plain.to_str())
    stored.enable_truncation(4)
    stored.enable_padding(length=9)
    assert len(TextTokenizer(stored, ROLES).encode(CORPUS[0])) == len(plain.encode(CORPUS[0]).ids)


# ---- chat -------------------------------------------------------------------------------


def test_chat(ours):
    messages = [{"role": "user", "content": "a <b> ü"}, {"role": "assistant", "content": "c"}]
    expected = "<|start|>user\na <b> ü<|end|>\n<|start|>assistant\nc<|end|>\n"
    assert ours.apply_chat(messages, add_generation_prompt=False) == expected
    assert ours.apply_chat(messages) == expected + "<|start|>assistant\n"


def test_a_template_has_the_names_of_transformers(ours):
    ours.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
        "{{ m.content | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}{{ eos_token }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<é'>"}]
    assert ours.apply_chat(messages) == '<|start|>"<é\'>"4<|end|>'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "Expected an expression"),
        (CHATML, "no tools here"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate str"),
        ("{{ nothing.here }}", "undefined"),
    ],
)
def test_a_template_that_fails_is_the_users_to_mend(template, message, ours):
    ours.chat_template = template
    with pytest.raises(UserError, match=rf"its chat template cannot write these 1 messages.*tool.*{message}"):
        ours.apply_chat([{"role": "tool", "content": "x"}])


def test_bad_messages_and_no_template(ours):
    with pytest.raises(UserError, match=r"message 1 is .*'role': 'user'.*, expected an object with 'role' and"):
        ours.apply_chat([{"role": "user", "content": "x"}, {"role": "user"}])
    ours.chat_template = None
    with pytest.raises(UserError, match="has no chat template, expected one"):
        ours.apply_chat([{"role": "user", "content": "x"}])


# ---- folders ----------------------------------------------------------------------------


def test_saved_and_read_it_is_the_same_tokenizer(ours, tmp_path):
    ours.save(tmp_path)
    again = tokenizer_from_folder(tmp_path)
    assert again.fingerprint() == ours.fingerprint() and len(ours.fingerprint()) == 64
    assert again.vocabulary == ours.vocabulary and again.special_tokens == ours.special_tokens
    assert (again.bos_id, again.eos_id, again.pad_id) == (1, 2, 2)
    assert again.chat_template == CHATML
    assert [ids.tolist() for ids in again.encode_batch(TEXTS)] == [ids.tolist() for ids in ours.encode_batch(TEXTS)]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and settings["eos_token"] == "<|end|>"


def test_a_fingerprint_tells_what_changes_ids(plain, ours):
    def fingerprint(change) -> str:
        other = Tokenizer.from_str(plain.to_str())
        change(other)
        return TextTokenizer(other, ROLES).fingerprint()

    def digits(other):
        other.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), other.pre_tokenizer])

    def fewer_merges(other):
        whole = json.loads(other.to_str())["model"]
        other.model = models.BPE(vocab=whole["vocab"], merges=[tuple(merge) for merge in whole["merges"][:-1]])

    assert fingerprint(lambda other: None) == ours.fingerprint()
    changes = [digits, fewer_merges, lambda other: other.add_tokens(["new"])]
    assert len({ours.fingerprint(), *map(fingerprint, changes)}) == 4


def test_other_spellings_of_a_folder(ours, tmp_path):
    ours.save(tmp_path)
    settings = {
        "eos_token": {"content": "<|end|>", "lstrip": False},
        "pad_token": None,
        "chat_template": [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = tokenizer_from_folder(tmp_path)
    assert (found.bos_id, found.eos_id, found.pad_id, found.chat_template) == (None, 2, None, "a")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert tokenizer_from_folder(tmp_path).chat_template == "from the file"


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", None, r"tokenizer\.json: no such file; the folder holds tokenizer_config\.json"),
        ("tokenizer.json", "{", r"tokenizer\.json: is not a tokenizer \("),
        ("tokenizer.json", "", r"tokenizer\.json: is not a tokenizer \("),
        ("tokenizer_config.json", None, r"tokenizer_config\.json: no such file"),
        ("tokenizer_config.json", "[", r"tokenizer_config\.json: is not valid JSON"),
        ("tokenizer_config.json", '{"eos_token": "<no>"}', "its eos token '<no>' is not in its vocabulary"),
    ],
)
def test_a_bad_folder(name, content, match, ours, tmp_path):
    ours.save(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=match) as caught:
        tokenizer_from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_no_folder(tmp_path):
    with pytest.raises(UserError, match="nope: no such folder"):
        tokenizer_from_folder(tmp_path / "nope")


# ---- GGUF -------------------------------------------------------------------------------


def test_rebuilt_from_gguf_it_is_the_same_tokenizer(as_gguf, ours):
    rebuilt = tokenizer_from_gguf(as_gguf())
    assert rebuilt.fingerprint() == ours.fingerprint()
    assert rebuilt.special_tokens == ours.special_tokens and rebuilt.chat_template == CHATML
    assert (rebuilt.bos_id, rebuilt.eos_id, rebuilt.pad_id) == (1, 2, 2)
    for text in TEXTS:
        assert np.array_equal(rebuilt.encode(text), ours.encode(text))
        assert rebuilt.decode(rebuilt.encode(text)) == text


def test_the_rule_smollm_splits_every_digit_off(as_gguf):
    plain, split = tokenizer_from_gguf(as_gguf()), tokenizer_from_gguf(as_gguf(**{"ggml.pre": "smollm"}))
    assert [plain.decode([number]) for number in plain.encode("in 1984")] == ["in", " 1984"]
    assert [split.decode([number]) for number in split.encode("in 1984")] == ["in", " ", "1", "9", "8", "4"]
    assert split.fingerprint() != plain.fingerprint()
    assert split.decode(split.encode("x1\u0664²½ 10")) == "x1\u0664²½ 10"


def test_no_rule_named_is_the_plain_one(as_gguf, ours):
    assert tokenizer_from_gguf(as_gguf(**{"ggml.pre": None})).fingerprint() == ours.fingerprint()
    assert tokenizer_from_gguf(as_gguf(**{"ggml.pre": "default"})).fingerprint() == ours.fingerprint()


def test_a_bos_is_added_only_when_asked(as_gguf):
    tokenizer = tokenizer_from_gguf(as_gguf(**{"ggml.add_bos_token": True}))
    bare = tokenizer.encode("the cat")
    assert 1 not in bare
    assert tokenizer.encode("the cat", add_special_tokens=True).tolist() == [1, *bare]


def test_user_defined_tokens_are_whole_and_not_special(as_gguf, plain):
    tokens = sorted(plain.get_vocab(), key=plain.token_to_id)
    changes = {"ggml.tokens": [*tokens, "<think>"], "ggml.token_type": [3] * 3 + [1] * 297 + [4]}
    tokenizer = tokenizer_from_gguf(as_gguf(**changes))
    assert tokenizer.encode("a<think>b").tolist().count(300) == 1
    assert tokenizer.decode([300], skip_special_tokens=True) == "<think>"
    assert list(tokenizer.special_tokens) == SPECIALS


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ggml.model": "bert"}, r"its tokenizer is 'bert', supported are 'gpt2' \(byte-level BPE\) and 'llama'"),
        ({"ggml.model": None}, "'tokenizer.ggml.model' is missing"),
        (
            {"ggml.pre": "falcon"},
            "its pre-tokenizer is 'falcon', supported are dbrx, default, gpt-2, llama-bpe, .*; another rule",
        ),
        ({"ggml.tokens": None}, "'tokenizer.ggml.tokens' is missing, expected list"),
        ({"ggml.tokens": ["a", "b", "a"]}, "token 'a' is there twice"),
        ({"ggml.tokens": ["a", "b"]}, "'tokenizer.ggml.token_type' has 300 entries for 2 tokens"),
        ({"ggml.merges": [1, 2]}, "'tokenizer.ggml.merges' holds 1, expected only str"),
        ({"ggml.merges": ["a q"]}, "merge 0 is 'a q', expected two tokens"),
        ({"ggml.merges": ["the"]}, "merge 0 is 'the', expected two tokens"),
        ({"ggml.eos_token_id": 300}, "its eos token has id 300, expected less than 300"),
    ],
)
def test_a_gguf_tokenizer_that_would_give_other_ids_is_refused(changes, match, as_gguf):
    with pytest.raises(UserError, match=match) as caught:
        tokenizer_from_gguf(as_gguf(**changes))
    assert "t.gguf: " in str(caught.value)


# ---- the real one -----------------------------------------------------------------------

SENTENCES = {
    "in 1984": [254, 216, 33, 41, 40, 36],
    "The capital of France is Paris.": [504, 3575, 282, 4649, 314, 7042, 30],
    "It's 10:45, isn't it?": [1589, 506, 216, 33, 32, 42, 36, 37, 28, 3247, 982, 357, 47],
    "def add(a, b):\n    return a + b  # 42\n": [
        *(1604, 803, 24, 81, 28, 278, 727, 472, 1003),
        *(253, 1232, 278, 216, 907, 216, 36, 34, 198),
    ],
}
_PIECES = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def by_hand(tokens: list[str], merges: list[str], text: str) -> list[int]:
    """Byte-level BPE of ASCII text without any library: digits off, GPT-2's pieces, then merge."""
    ids = {token: number for number, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    found = []
    for part in re.findall(r"[0-9]|[^0-9]+", text):
        for piece in [part] if part.isdigit() else _PIECES.findall(part):
            symbols = list(piece.replace(" ", "Ġ").replace("\n", "Ċ"))
            while len(symbols) > 1:
                rank, at = min((ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairwise(symbols)))
                if rank == len(ranks):
                    break
                symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
            found += [ids[symbol] for symbol in symbols]
    return found


@pytest.mark.network
def test_the_real_tokenizer(smollm2_gguf):
    opened = open_gguf(smollm2_gguf)
    tokenizer = tokenizer_from_gguf(opened)
    tokens, merges = opened.get("tokenizer.ggml.tokens", list), opened.get("tokenizer.ggml.merges", list)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (49152, 1, 2, 2)
    assert list(tokenizer.special_tokens.values()) == list(range(17))
    for text, expected in SENTENCES.items():
        assert tokenizer.encode(text).tolist() == expected == by_hand(tokens, merges, text), text
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    source = Path(__file__).read_text(encoding="utf-8")
    assert tokenizer.decode(tokenizer.encode(source)) == source
    digits = [tokens[number] for number in tokenizer.encode(source) if re.search(r"\d", tokens[number])]
    assert len(digits) > 100 and {len(token) for token in digits} == {1}
    chat = tokenizer.apply_chat([{"role": "user", "content": "Hi"}])
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
