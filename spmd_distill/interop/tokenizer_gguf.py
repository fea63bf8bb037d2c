"""Rebuild the tokenizer that a GGUF file describes.

A GGUF file holds the vocabulary and the kind of each token, and one of two things:

- ``gpt2``: byte-level BPE. The merges are there, but only the NAME of the rule that splits text before them. The rule
  changes the ids (``smollm`` splits every digit off), so a name without a known rule is refused.
- ``llama``: SentencePiece BPE (Llama 2, Mistral, Gemma). Spaces are ``▁``; of all neighbours that make a token those
  with the best score are merged first; a character outside of the vocabulary becomes its bytes. The scores make the
  list of merges that the tokenizers library wants: every pair of tokens that makes a token, best first, as
  transformers makes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from spmd_distill.errors import UserError
from spmd_distill.interop.cursor import AGAIN
from spmd_distill.interop.gguf import GGUF
from spmd_distill.interop.tokenizer import ROLES, TextTokenizer

_FOLDER = "Give the model's Hugging Face folder (tokenizer.json) instead."
_UNDEFINED, _NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = range(5)  # kinds of token, in llama.cpp's numbering
_SPACE = "▁"
_MAX_PIECE = 1024  # many times the longest in use; looking for the parts of a token takes time with its square
_KEEPS_SPACE = {"<unk>", "<s>", "<|endoftext|>"}


def tokenizer_from_gguf(gguf: GGUF) -> TextTokenizer:
    """Rebuild the byte-level or SentencePiece BPE tokenizer of a GGUF file, exact to the id.

    Raises `UserError` for another kind of tokenizer, for a pre-tokenizer whose rule is not known here (naming
    the known ones), and for vocabulary, merges or scores that are missing, malformed or contradict each other.
    """
    kind = gguf.get("tokenizer.ggml.model", str)
    if kind not in _BUILDERS:
        raise UserError(
            f"{gguf.path}: its tokenizer is {kind!r}, supported are 'gpt2' (byte-level BPE) and 'llama' "
            f"(SentencePiece BPE). {_FOLDER}"
        )
    vocabulary = _read_vocabulary(gguf)
    tokenizer, adds_bos = _BUILDERS[kind](gguf, vocabulary)
    _add_whole_tokens(tokenizer, vocabulary, kind == "llama" and gguf.metadata.get("general.architecture") == "phi3")
    before = [vocabulary.roles["bos"]] if _flag(gguf, "add_bos_token", adds_bos) and "bos" in vocabulary.roles else []
    after = [vocabulary.roles["eos"]] if _flag(gguf, "add_eos_token", False) and "eos" in vocabulary.roles else []
    if before or after:
        try:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after],
                special_tokens=[(token, vocabulary.ids[token]) for token in dict.fromkeys([*before, *after])],
            )
        except ValueError as error:
            raise UserError(f"{gguf.path}: cannot put {before} before a text and {after} after it: {error}.") from None
    template = gguf.get("tokenizer.chat_template", str, None)
    return TextTokenizer(tokenizer, vocabulary.roles, template, str(gguf.path))


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    """Token strings by id."""
    ids: dict[str, int]
    kinds: list[int]
    roles: dict[str, str]


def _read_vocabulary(gguf: GGUF) -> _Vocabulary:
    tokens = _list(gguf, "tokens", str)
    if not tokens:
        raise UserError(f"{gguf.path}: metadata 'tokenizer.ggml.tokens' is empty, expected a vocabulary. {AGAIN}")
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise UserError(f"{gguf.path}: token {twice!r} is there twice, expected once. {AGAIN}")
    kinds = _list(gguf, "token_type", int, len(tokens)) if "tokenizer.ggml.token_type" in gguf.metadata else None
    roles = {}
    for role, key in zip(ROLES, ("bos", "eos", "padding", "unknown"), strict=True):
        number = gguf.get(f"tokenizer.ggml.{key}_token_id", int, None)
        if number is not None and not 0 <= number < len(tokens):
            raise UserError(
                f"{gguf.path}: its {role} token has id {number}, expected less than {len(tokens)}. Convert it again."
            )
        if number is not None:
            roles[role] = tokens[number]
    return _Vocabulary(tokens, ids, kinds or [_NORMAL] * len(tokens), roles)


def _list(gguf: GGUF, key: str, kind: type, length: int | None = None) -> list[Any]:
    """Read an array of one kind and, if given, of one length."""
    key = f"tokenizer.ggml.{key}"
    found = gguf.get(key, list)
    wrong = next((value for value in found if type(value) is not kind), None)
    if wrong is not None:
        raise UserError(f"{gguf.path}: metadata {key!r} holds {wrong!r}, expected only {kind.__name__}. {AGAIN}")
    if length is not None and len(found) != length:
        raise UserError(f"{gguf.path}: metadata {key!r} has {len(found)} entries for {length} tokens. {AGAIN}")
    return found


def _flag(gguf: GGUF, key: str, default: bool) -> bool:
    return gguf.get(f"tokenizer.ggml.{key}", bool, default)


def _add_whole_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, strip_right: bool) -> None:
    """Control and user-defined tokens are found in a text before anything else, and never cut.

    ``strip_right``: control tokens take the white space after them, as those of Phi 3 do.
    """
    control, own = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind == _CONTROL:
            strip = strip_right and token not in _KEEPS_SPACE
            control.append(AddedToken(token, special=True, normalized=False, rstrip=strip))
        elif kind == _USER_DEFINED:
            own.append(AddedToken(token, normalized=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(own)


# ---- byte-level BPE ---------------------------------------------------------------------


def _byte_level(gguf: GGUF, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = gguf.get("tokenizer.ggml.pre", str, "default")
    if name not in _RULES:
        raise UserError(
            f"{gguf.path}: its pre-tokenizer is {name!r}, supported are {', '.join(sorted(_RULES))}; "
            f"another rule would give other ids. {_FOLDER}"
        )
    rule = _RULES[name]
    merges = [tuple(merge.split(" ")) for merge in _list(gguf, "merges", str)]
    for rank, merge in enumerate(merges):
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.ids.keys():
            raise UserError(
                f"{gguf.path}: merge {rank} is {' '.join(merge)!r}, expected two tokens of the vocabulary "
                f"that make a third. {AGAIN}"
            )
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=rule.whole_pieces))
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.split()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.adds_bos


@dataclass(frozen=True)
class _Rule:
    """What a name in ``tokenizer.ggml.pre`` stands for, as in the ``tokenizer.json`` of its models."""

    split: Callable[[], pre_tokenizers.PreTokenizer]
    whole_pieces: bool = False
    """A piece that is a token is that token, whatever the merges would make of it."""
    composes: bool = False
    """Text is brought into Unicode's composed form first."""
    adds_bos: bool = False
    """Where the file does not say."""


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(*alternatives: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    pattern = "|".join(alternatives)

    def split() -> pre_tokenizers.PreTokenizer:
        pieces = pre_tokenizers.Split(Regex(pattern), "isolated")
        return pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return split


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")

_cl100k = _pattern(_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _SIGNS, *_SPACES)
_qwen2 = _pattern(_CONTRACTIONS, _WORDS, r"\p{N}", _SIGNS, *_SPACES)
_tekken = _pattern(*_CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", *_SPACES)
_llama3 = _Rule(_cl100k, whole_pieces=True, adds_bos=True)
_RULES = {
    "default": _Rule(_gpt2),
    "gpt-2": _Rule(_gpt2),
    "smollm": _Rule(_smollm),
    "llama-bpe": _llama3,
    "llama-v3": _llama3,
    "llama3": _llama3,
    "dbrx": _Rule(_cl100k),  # OLMo 2, Phi 4
    "qwen2": _Rule(_qwen2, composes=True),
    "tekken": _Rule(_tekken, whole_pieces=True, adds_bos=True),
}


# ---- SentencePiece BPE ------------------------------------------------------------------


def _sentencepiece(gguf: GGUF, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    unknown = vocabulary.roles.get("unk")
    if unknown is None and _UNKNOWN in vocabulary.kinds:
        unknown = vocabulary.tokens[vocabulary.kinds.index(_UNKNOWN)]
    lacking = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary.ids]
    if lacking and unknown is None:
        raise UserError(
            f"{gguf.path}: its vocabulary lacks {len(lacking)} bytes, such as '<0x{lacking[0]:02X}>', and an unknown "
            f"token; expected one or the other, for text would be lost. {_FOLDER}"
        )
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_by_score(gguf, vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(gguf, "add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        back.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer, True


def _merges_by_score(gguf: GGUF, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens that makes an ordinary token, the best score first, then the longer left part.

    No two tokens of a trained vocabulary have one score, so the order among equals does not matter to a text, but for
    runs of one character.
    """
    scores = _list(gguf, "scores", float, len(vocabulary.tokens))
    if not np.isfinite(scores).all():
        raise UserError(f"{gguf.path}: metadata 'tokenizer.ggml.scores' holds numbers that are not finite. {AGAIN}")
    ids = vocabulary.ids
    longest = max(map(len, vocabulary.tokens))
    if longest > _MAX_PIECE:
        raise UserError(f"{gguf.path}: a token has {longest} characters, expected at most {_MAX_PIECE}. {AGAIN}")
    found = [
        (-score, -cut, -len(token), token)
        for token, kind, score in zip(vocabulary.tokens, vocabulary.kinds, scores, strict=True)
        if kind in (_UNDEFINED, _NORMAL)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    found.sort(key=lambda merge: merge[:3])
    return [(token[:-cut], token[-cut:]) for _, cut, _, token in found]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
