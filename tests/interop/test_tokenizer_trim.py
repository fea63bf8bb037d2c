import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from spmd_distill.errors import UserError
from spmd_distill.interop import (
    TextTokenizer,
    open_gguf,
    rows_of,
    tokenizer_from_folder,
    tokenizer_from_gguf,
    trim_tokenizer,
    used_tokens,
)

SPECIALS = ["<unk>", "<s>", "</s>"]
ROLES = {"bos": "<s>", "eos": "</s>", "pad": "</s>", "unk": "<unk>"}
CORPUS = [
    "the cat sat on the mat and the dog sat in the fog, aaaa aaaaaaa",
    "the weather was whether the other brother gathered feathers together",
    "naïve café, straße, 東京 東京, 🙂🙃",
] * 4
KEPT = ["the cat sat", "the other feathers", "café aaaaaaa"]
OTHER = [
    "",
    "\n\n\ttabs  and   spaces \r\n",
    "in 1984 it was 3.14159",
    "naïve straße 東京 🙂🙃👍🏽 x\u0301",
    "\x00\x7f\u200b\ufeff",
    "здравствуй שלום ١٢٣ ½ together",
]
NOTE = "<note>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _post_processors(whole: Tokenizer) -> dict:
    pairs = [(token, whole.token_to_id(token)) for token in SPECIALS]
    template = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=pairs)
    bytes_of_text = processors.ByteLevel(trim_offsets=False)
    return {
        "none": bytes_of_text,
        "template": template,
        "nested": processors.Sequence([bytes_of_text, processors.Sequence([template])]),
        "bert": processors.BertProcessing(pairs[2], pairs[1]),
        "roberta": processors.RobertaProcessing(pairs[2], pairs[1], trim_offsets=False, add_prefix_space=False),
    }


def byte_level(post_processor: str = "template", added_last: bool = False) -> TextTokenizer:
    """GPT-2's kind. Special tokens come first and are the model's too, or last and are not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=[] if added_last else SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if added_last:
        tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken(NOTE, normalized=False)])  # neither special nor the model's
    tokenizer.post_processor = _post_processors(tokenizer)[post_processor]
    return TextTokenizer(tokenizer, ROLES, "{{ bos_token }}{{ messages[0].content }}")


def sentencepiece(kind: str, metaspace: bool = False) -> TextTokenizer:
    """Spaces are ▁ and bytes are tokens. Of BPE, every pair of tokens that makes one is a merge, as in Llama 2."""
    trained = Tokenizer(models.BPE() if kind == "BPE" else models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    if kind == "BPE":
        trainer = trainers.BpeTrainer(vocab_size=180, special_tokens=SPECIALS, show_progress=False)
    else:
        trainer = trainers.UnigramTrainer(
            vocab_size=80, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
        )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    if kind == "BPE":
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        tokens = SPECIALS + BYTES + tokens[len(SPECIALS) :]
        vocab = {token: number for number, token in enumerate(tokens)}
        merges = [
            (token[:cut], token[cut:])
            for token in tokens[len(SPECIALS) + 256 :]
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ]
        made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    else:
        pieces = [(piece, round(score, 4)) for piece, score in model["vocab"]]  # the library's JSON loses the last bit
        pieces[3:3] = [(byte, 0.0) for byte in BYTES]
        made = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    made.add_special_tokens(SPECIALS)
    made.add_tokens([AddedToken(NOTE, normalized=False)])
    back = [decoders.ByteFallback(), decoders.Fuse()]
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        made.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="always", split=False), *back])
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), *back, decoders.Strip(" ", 1, 0)])
    made.post_processor = _post_processors(made)["template"]
    return TextTokenizer(made, ROLES)


MAKERS = {
    "byte-level": (byte_level, "none", False),
    **{f"byte-level, {name}": (byte_level, name, True) for name in ("template", "nested", "bert", "roberta")},
    "SentencePiece BPE": (sentencepiece, "BPE"),
    "SentencePiece BPE, Metaspace": (sentencepiece, "BPE", True),
    "SentencePiece Unigram": (sentencepiece, "Unigram"),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def full(request) -> TextTokenizer:
    make, *arguments = MAKERS[request.param]
    return make(*arguments)


def check(full: TextTokenizer, trimmed: TextTokenizer, rows: np.ndarray, kept: list[str]) -> None:
    """What holds of every trimmed tokenizer: ids and strings one to one, roles, kept texts, and all other texts."""
    strings = {number: token for token, number in full.vocabulary.items()}
    assert rows.dtype == np.int32 and (np.diff(rows) > 0).all() and trimmed.vocab_size == len(rows)
    assert trimmed.vocabulary == {strings[row]: number for number, row in enumerate(rows.tolist())}
    assert list(trimmed.special_tokens) == list(full.special_tokens)
    assert trimmed.roles == full.roles and trimmed.chat_template == full.chat_template
    assert [rows[trimmed.bos_id], rows[trimmed.eos_id], rows[trimmed.pad_id]] == [full.bos_id, full.eos_id, full.pad_id]
    assert rows_of(trimmed, full).tolist() == rows.tolist()
    for text in [*kept, *full.special_tokens, full.roles["bos"] + kept[0] + full.roles["eos"]]:
        for add in (False, True):
            ids, old = (one.encode(text, add_special_tokens=add) for one in (trimmed, full))
            assert rows[ids].tolist() == old.tolist(), text
    added = len(full.encode("", add_special_tokens=True))
    for text in [*OTHER, *kept]:
        ids = trimmed.encode(text)
        assert trimmed.decode(ids) == full.decode(full.encode(text))
        assert text in kept or trimmed.decode(ids) == text
        assert len(trimmed.encode(text, add_special_tokens=True)) == len(ids) + added


def test_kept_text_has_the_same_tokens_and_other_text_comes_back(full):
    keep = used_tokens(full, KEPT)
    trimmed, rows = trim_tokenizer(full, reversed(keep))
    check(full, trimmed, rows, [*KEPT, KEPT[0] + NOTE + KEPT[2]])
    assert set(keep.tolist()) <= set(rows.tolist()) and len(rows) < full.vocab_size - 20
    assert NOTE in trimmed.vocabulary and NOTE not in trimmed.special_tokens


def test_each_token_alone_can_be_kept(full):
    """Of all tokens that some text is made of, whatever the merges that lead to it."""
    for token, number in full.vocabulary.items():
        text = full.decode([number])
        if full.encode(text).tolist() == [number] and "\ufffd" not in text:
            trimmed, rows = trim_tokenizer(full, [number])
            assert rows[trimmed.encode(text)].tolist() == [number], token


def test_nothing_kept_leaves_what_any_text_is_made_of(full):
    trimmed, rows = trim_tokenizer(full, [])
    check(full, trimmed, rows, [NOTE])
    model = json.loads(full._tokenizer.to_str())["model"]
    space, worst = "▁" in full.vocabulary, model["type"] == "Unigram"
    assert len(rows) == 256 + len(SPECIALS) + len([NOTE]) + space + worst


def test_everything_kept_is_the_identity(full):
    trimmed, rows = trim_tokenizer(full, range(full.vocab_size))
    assert rows.tolist() == list(range(full.vocab_size))
    assert json.loads(trimmed._tokenizer.to_str()) == json.loads(full._tokenizer.to_str())
    assert trimmed.fingerprint() == full.fingerprint()


def test_trimming_twice_and_saving(full, tmp_path):
    keep = used_tokens(full, KEPT)
    once, rows = trim_tokenizer(full, keep)
    again, more = trim_tokenizer(once, used_tokens(once, KEPT[:1]))
    check(full, again, rows[more], KEPT[:1])
    assert len(more) < len(rows)
    once.save(tmp_path)
    assert tokenizer_from_folder(tmp_path).fingerprint() == once.fingerprint()


def test_only_the_merges_on_the_way_are_needed():
    """Every split of a SentencePiece token is a merge; the tokens of the splits not taken may go."""
    tokens = ["a", "b", "c", "d", "bc", "ab", "abc", "abcd", "cd"]
    vocab = {token: number for number, token in enumerate(tokens + BYTES)}
    merges = [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c"), ("c", "d"), ("ab", "cd"), ("abc", "d")]
    full = TextTokenizer(Tokenizer(models.BPE(vocab, merges, byte_fallback=True)), {})
    trimmed, rows = trim_tokenizer(full, [vocab["abcd"]])
    assert trimmed.vocabulary.keys() - set(BYTES) == {"a", "b", "c", "d", "ab", "abc", "abcd"}
    assert rows[trimmed.encode("abcdabc")].tolist() == full.encode("abcdabc").tolist() == [7, 6]


class OldSpelling:
    """A tokenizer whose JSON has its merges as older releases wrote them."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def to_str(self) -> str:
        whole = json.loads(self.tokenizer.to_str())
        whole["model"]["merges"] = [" ".join(merge) for merge in whole["model"]["merges"]]
        return json.dumps(whole)


def test_both_spellings_of_merges():
    full, old = byte_level(), byte_level()
    old._tokenizer = OldSpelling(old._tokenizer)  # pyright: ignore[reportAttributeAccessIssue]
    keep = used_tokens(full, KEPT)
    (a, rows_a), (b, rows_b) = trim_tokenizer(full, keep), trim_tokenizer(old, keep)
    assert a.fingerprint() == b.fingerprint() and rows_a.tolist() == rows_b.tolist()


def test_the_unknown_character_of_a_unigram_model_costs_as_before():
    """The pieces of "abc" are cheaper than an unknown character by a piece of a bad score that no text uses."""
    pieces = [("<unk>", 0.0), ("a", -8.0), ("b", -9.0), ("cab", -1.0), ("c", -8.0), ("q", -20.0)]
    full = TextTokenizer(Tokenizer(models.Unigram(pieces, 0, byte_fallback=False)), {"unk": "<unk>"})
    for texts in (["ab"], ["cab", "abc"], ["xab"]):
        trimmed, rows = trim_tokenizer(full, used_tokens(full, texts))
        assert "q" in trimmed.vocabulary
        for text in texts:
            assert rows[trimmed.encode(text)].tolist() == full.encode(text).tolist()


def test_an_ordinary_token_that_is_put_around_a_text_stays():
    full = byte_level()
    number = full.vocabulary["Ġthe"]
    full._tokenizer.post_processor = processors.TemplateProcessing(single="x $A", special_tokens=[("x", number)])
    trimmed, rows = trim_tokenizer(full, [])
    assert rows[trimmed.encode("a", add_special_tokens=True)].tolist() == [number, *full.encode("a")]


def test_used_tokens_are_those_of_all_texts():
    full = byte_level()
    texts = [KEPT[number % 2] for number in range(3000)] + [OTHER[2]]
    expected = {int(number) for text in set(texts) for number in full.encode(text)}
    assert used_tokens(full, iter(texts)).tolist() == sorted(expected)
    assert used_tokens(full, []).tolist() == []


def test_rows_of_another_tokenizer():
    teacher = byte_level(added_last=True)
    student = byte_level()  # the same tokens in another order
    rows = rows_of(student, teacher)
    assert rows is not None
    for token, number in student.vocabulary.items():
        assert rows[number] == teacher.vocabulary[token]
    trimmed, _ = trim_tokenizer(teacher, used_tokens(teacher, KEPT))
    assert rows_of(teacher, trimmed) is None  # a token that the other lacks
    changed = json.loads(teacher._tokenizer.to_str())
    next(token for token in changed["added_tokens"] if token["content"] == "<s>")["special"] = False
    other = TextTokenizer(Tokenizer.from_str(json.dumps(changed)), {})
    assert rows_of(teacher, other) is None and rows_of(other, teacher) is None


def _lossy(**settings) -> TextTokenizer:
    return TextTokenizer(Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], **settings)), {}, source="lossy")


def test_mistakes_are_named():
    full = byte_level()
    for wrong in (-1, full.vocab_size):
        with pytest.raises(UserError, match=f"cannot keep id {wrong}, expected ids of 0 to {full.vocab_size - 1}"):
            trim_tokenizer(full, [0, wrong])
    for kind, model in {
        "WordLevel": models.WordLevel({"a": 0}, "a"),
        "WordPiece": models.WordPiece({"a": 0}, unk_token="a"),
    }.items():
        with pytest.raises(UserError, match=f"words: a tokenizer of type {kind} .* expected BPE or Unigram"):
            trim_tokenizer(TextTokenizer(Tokenizer(model), {}, source="words"), [0])
    with pytest.raises(UserError, match="lossy: it has neither bytes"):
        trim_tokenizer(_lossy(), [0])
    assert trim_tokenizer(_lossy(unk_token="b"), [0])[0].vocabulary == {"a": 0, "b": 1}
    with pytest.raises(UserError, match="end_of_word_suffix '</w>'"):
        trim_tokenizer(_lossy(unk_token="b", end_of_word_suffix="</w>"), [0])
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 99)])
    broken = _lossy(unk_token="b")
    broken._tokenizer.post_processor = template
    with pytest.raises(UserError, match="post_processor adds the id 99, expected one of its 3 tokens"):
        trim_tokenizer(broken, [0])


@pytest.mark.network
def test_the_real_tokenizer(smollm2_gguf):
    full = tokenizer_from_gguf(open_gguf(smollm2_gguf))
    source = Path(__file__).read_text(encoding="utf-8")
    texts = [*source.split("\n"), "The quick brown fox jumps over the lazy dog.", source]
    trimmed, rows = trim_tokenizer(full, used_tokens(full, texts))
    assert 300 < len(rows) < 3000
    check(full, trimmed, rows, texts)
    chat = [{"role": "user", "content": "The lazy dog."}]
    assert trimmed.apply_chat(chat) == full.apply_chat(chat)
    same, all_rows = trim_tokenizer(full, range(full.vocab_size))
    assert same.fingerprint() == full.fingerprint() and all_rows.tolist() == list(range(full.vocab_size))
