"""Which bytes a token stands for: against the tokens' own bytes, and against the offsets of the library."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer, open_gguf, tokenizer_from_gguf

SPECIALS = ["<s>", "</s>"]
PIECES = [
    " ",
    "  ",
    "\n",
    "a",
    "the",
    " cat",
    "é",
    "e\u0301",
    "東京",
    "🙂",
    "👨‍👩‍👧",
    "</s>",
    "<s>",
    "1984",
    "\u200b",
    "ß",
    "\x00",
    "\ufb01",
]
TEXTS = ["", *PIECES, *("".join(random.Random(i).choices(PIECES, k=12)) for i in range(60))]


def byte_level(**parts) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        show_progress=False,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the cat 東京 é 1984"] * 5, trainer)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def sentencepiece(**parts) -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz", "東", "▁c", "▁ca", "▁cat", "th", "the"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "c"), ("▁c", "a"), ("▁ca", "t"), ("t", "h"), ("th", "e")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(SPECIALS)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def template() -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])


KINDS = {
    "byte level": byte_level(),
    "byte level, offsets trimmed": byte_level(post_processor=processors.ByteLevel(trim_offsets=True)),
    "split before": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "spaces replaced": sentencepiece(normalizer=normalizers.Replace(" ", "▁")),
    "spaces replaced, one before": sentencepiece(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "metaspace": sentencepiece(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
}
DUMMY = {"spaces replaced, one before", "metaspace"}


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(i): i for i in PRINTABLE} | {
    chr(256 + n): i for n, i in enumerate(i for i in range(256) if i not in PRINTABLE)
}
"""GPT-2 writes a printable byte as the character of its number, the other bytes as those from 256."""


def own_bytes(tokenizer: Tokenizer, number: int) -> bytes:
    """The bytes of a token by what its string means in its kind of vocabulary, written down anew."""
    token = tokenizer.id_to_token(number)
    if token in SPECIALS:
        return token.encode()
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return bytes(BYTES[c] for c in token)
    if token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_bytes_that_its_string_says(kind):
    tokenizer = KINDS[kind]
    ours = TextTokenizer(Tokenizer.from_str(tokenizer.to_str()), {})
    for text in TEXTS:
        ids, spans = ours.encode_spans(text)
        data = text.encode()
        assert ids.tolist() == ours.encode(text).tolist()
        assert b"".join(data[a:b] for a, b in spans) == data, text
        for number, (a, b) in zip(ids.tolist(), spans.tolist(), strict=True):
            own = own_bytes(tokenizer, number)
            dummy = kind in DUMMY and own[:1] == b" " and data[a:b] == own[1:]  # the space that no text had
            assert data[a:b] == own or dummy, (text, spans)


@pytest.mark.parametrize("kind", ["byte level", "spaces replaced"])
def test_spans_agree_with_the_offsets_of_the_library_where_it_has_any(kind):
    tokenizer = KINDS[kind]
    ours = TextTokenizer(Tokenizer.from_str(tokenizer.to_str()), {})
    compared = 0
    for text in TEXTS:
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        _, spans = ours.encode_spans(text)
        for (first, last), span in zip(offsets, spans.tolist(), strict=True):
            if sum(a < last and first < b for a, b in offsets) == 1:  # no other token has a part of its characters
                assert span == [len(text[:first].encode()), len(text[:last].encode())]
                compared += 1
    assert compared > 200


def test_an_emoji_of_several_tokens_is_divided_among_them():
    tokenizer = byte_level()
    assert tokenizer.encode("🙂").offsets == [(0, 1)] * 4, "four tokens, of which the library says the same"
    _, spans = TextTokenizer(tokenizer, {}).encode_spans("a🙂b")
    assert spans.tolist() == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]


@pytest.mark.parametrize(
    "normalizer", [normalizers.NFC(), normalizers.NFKC(), normalizers.NFD(), normalizers.Lowercase()]
)
def test_what_a_normaliser_changes_still_belongs_to_a_token(normalizer):
    ours = TextTokenizer(byte_level(normalizer=normalizer), {})
    for text in TEXTS:
        _, spans = ours.encode_spans(text)
        covered = np.zeros(len(text.encode()), bool)
        for a, b in spans:
            covered[a:b] = True
        assert covered.all(), (text, spans)
        assert (np.diff(spans[:, 0]) >= 0).all() and (spans[:, 0] <= spans[:, 1]).all()


def test_tokens_around_a_text_have_no_bytes():
    ours = TextTokenizer(byte_level(post_processor=template()), {})
    for text in TEXTS:
        plain, inner = ours.encode_spans(text)
        ids, spans = ours.encode_spans(text, add_special_tokens=True)
        assert ids.tolist() == [0, *plain.tolist(), 1] == ours.encode(text, add_special_tokens=True).tolist()
        size = len(text.encode())
        assert spans.tolist() == [[0, 0], *inner.tolist(), [size, size]]


def test_text_without_a_unicode_form_is_refused():
    with pytest.raises(UserError, match="character 1 is the lone surrogate"):
        TextTokenizer(byte_level(), {}).encode_spans("a\ud800")


@pytest.mark.network
def test_the_tokens_of_smollm2_have_the_bytes_that_their_strings_say(smollm2_gguf):
    ours = tokenizer_from_gguf(open_gguf(smollm2_gguf))
    strings = {number: token for token, number in ours.vocabulary.items()}
    for text in [*TEXTS, "in 1984 👩🏽‍🚀 <|im_start|>user\n x<|im_end|>"]:
        ids, spans = ours.encode_spans(text)
        data = text.encode()
        for number, (a, b) in zip(ids.tolist(), spans.tolist(), strict=True):
            token = strings[number]
            assert data[a:b] == (token.encode() if token in ours.special_tokens else bytes(BYTES[c] for c in token))
