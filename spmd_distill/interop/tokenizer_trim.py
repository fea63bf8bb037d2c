"""A smaller vocabulary for a student: only the tokens that its texts use, and what any other text falls back on.

The rows of an embedding and of an output layer are most of a small model. A trimmed tokenizer gives the texts that its
tokens were counted on the same tokens as before, under new ids; any other text becomes shorter tokens, down to bytes.
Why the tokens stay the same: BPE applies the best-ranked merge that fits. All merges that made a text's tokens are
still there, in their order, so each of them is still the best that fits. A Unigram model takes the best path through
all pieces, and it is still the best of fewer.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from operator import index
from typing import Any, SupportsIndex

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from spmd_distill.errors import UserError
from spmd_distill.interop.tokenizer import TextTokenizer

_BATCH = 1024  # texts encoded at a time
_FALLBACK = frozenset(f"<0x{byte:02X}>" for byte in range(256))  # what byte fallback calls them


def trim_tokenizer(
    tokenizer: TextTokenizer, keep: Iterable[SupportsIndex] | np.ndarray
) -> tuple[TextTokenizer, np.ndarray]:
    """Return a tokenizer of fewer tokens, and the old id of each of its ids.

    Besides ``keep`` stay: every added token, special or not, with its role; the unknown token; every single byte, of a
    byte-level vocabulary or of byte fallback, with the sign for a space; and the tokens that merges pass through on
    the way to a kept one. A Unigram model also keeps its worst piece, whose score decides what an unknown character
    costs. Text goes through the same normaliser, splitting, post-processor, decoder and chat template as before.

    Args:
        tokenizer: Of type BPE or Unigram.
        keep: Ids of the tokens to keep, in any order, such as those of `used_tokens`.

    Returns:
        The trimmed tokenizer, whose ids are dense and in the old order, and ``rows``, int32 ``[new ids]``:
        ``rows[new_id]`` is the old id, so ``embedding[rows]`` is the trimmed embedding.

    Raises:
        UserError: An id is out of range; the tokenizer is of another type, writes tokens inside of a word otherwise, or
            has neither bytes nor an unknown token, so that it would drop text; its post-processor adds an id that
            is no token; its added tokens lie between the others.
    """
    whole = json.loads(tokenizer._tokenizer.to_str())
    model, ids = whole["model"], tokenizer.vocabulary
    _check(whole, tokenizer.source)
    tokens = {number: token for token, number in ids.items()}
    kept = {tokens[number] for number in _checked(keep, tokenizer) if number in tokens}
    kept |= _bpe_needs(model, kept) if model["type"] == "BPE" else _unigram_needs(model)
    kept |= {token["content"] for token in whole["added_tokens"]} | set(tokenizer.roles.values())
    for written, at in _ids_written(whole["post_processor"]):
        if written[at] not in tokens:
            raise UserError(
                f"{tokenizer.source}: its post_processor adds the id {written[at]}, expected one of its "
                f"{len(tokens)} tokens. Use tokenizer files that belong together."
            )
        kept.add(tokens[written[at]])
    kept |= _bytes(whole)
    order = sorted(kept & ids.keys(), key=ids.__getitem__)
    new = {token: number for number, token in enumerate(order)}

    (_trim_bpe if model["type"] == "BPE" else _trim_unigram)(model, new)
    for token in whole["added_tokens"]:
        token["id"] = new[token["content"]]
    for written, at in _ids_written(whole["post_processor"]):
        written[at] = new[tokens[written[at]]]
    trimmed = TextTokenizer(
        Tokenizer.from_str(json.dumps(whole)), tokenizer.roles, tokenizer.chat_template, f"{tokenizer.source} (trimmed)"
    )
    got = trimmed.vocabulary
    if got != new:  # the library numbers added tokens that are not the model's after all that are
        token = next(token for token in order if got.get(token) != new[token])
        raise UserError(
            f"{tokenizer.source}: trimmed, its token {token!r} would get the id {got.get(token)}, expected "
            f"{new[token]}: its added tokens lie between the others. Use the tokenizer untrimmed."
        )
    return trimmed, np.array([ids[token] for token in order], np.int32)


def used_tokens(tokenizer: TextTokenizer, texts: Iterable[str]) -> np.ndarray:
    """Return the ids that texts are made of, sorted, int32 ``[ids]``. Texts are read once, some at a time.

    Raises `UserError` for text that has no UTF-8 form.
    """
    used = np.zeros(tokenizer.vocab_size, bool)
    texts = iter(texts)
    while batch := list(islice(texts, _BATCH)):
        for ids in tokenizer.encode_batch(batch):
            used[ids] = True
    return np.flatnonzero(used).astype(np.int32)


def rows_of(student: TextTokenizer, teacher: TextTokenizer) -> np.ndarray | None:
    """Return the teacher's id of each of the student's tokens, int32 ``[student.vocab_size]``.

    So ``teacher_embedding[rows]`` lines up with the student's vocabulary. None if some id of the student stands for no
    token, for a token that the teacher lacks, or for one that is special (a control token) in only one of the two.
    """
    theirs, special, theirs_special = teacher.vocabulary, student.special_tokens, teacher.special_tokens
    rows = np.full(student.vocab_size, -1, np.int32)
    for token, number in student.vocabulary.items():
        if token in theirs and (token in special) == (token in theirs_special):
            rows[number] = theirs[token]
    return None if (rows < 0).any() else rows


def _check(whole: dict[str, Any], source: str) -> None:
    model = whole["model"]
    kind = model["type"]
    if kind not in ("BPE", "Unigram"):
        raise UserError(
            f"{source}: a tokenizer of type {kind} cannot be trimmed, expected BPE or Unigram. Use it untrimmed."
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UserError(
                f"{source}: its model has the {key} {model[key]!r}, expected none: tokens that are written otherwise "
                "inside of a word cannot be trimmed. Use the tokenizer untrimmed."
            )
    if not _bytes(whole) and model.get("unk_token") is None and model.get("unk_id") is None:
        raise UserError(
            f"{source}: it has neither bytes (ByteLevel or byte_fallback) nor an unknown token, expected one or the "
            "other: trimmed, it would drop text. Use it untrimmed."
        )


def _checked(keep: Iterable[SupportsIndex] | np.ndarray, tokenizer: TextTokenizer) -> list[int]:
    numbers = [index(number) for number in keep]
    for number in numbers:
        if not 0 <= number < tokenizer.vocab_size:
            raise UserError(
                f"{tokenizer.source}: cannot keep id {number}, expected ids of 0 to {tokenizer.vocab_size - 1}. The "
                "ids belong to another tokenizer."
            )
    return numbers


def _bytes(whole: dict[str, Any]) -> set[str]:
    """The tokens that any text can be made of, as the vocabulary writes them; it may lack some."""
    found = set[str]()
    if whole["model"].get("byte_fallback"):
        found |= _FALLBACK
        for part in _parts(whole["decoder"]):  # what it turns into a space must not have become bytes before
            found |= set(part.get("replacement", "") if part["type"] == "Metaspace" else ())
            found |= set(part["pattern"].get("String", "") if part["type"] == "Replace" else ())
    if any(part["type"] == "ByteLevel" for name in ("normalizer", "pre_tokenizer") for part in _parts(whole[name])):
        found |= set(pre_tokenizers.ByteLevel.alphabet())
    return found


def _parts(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A normaliser, pre-tokenizer, post-processor or decoder, and those that it is a sequence of."""
    if part is not None:
        yield part
        for name in ("normalizers", "pretokenizers", "processors", "decoders"):
            for inner in part.get(name, ()):
                yield from _parts(inner)


def _ids_written(processor: dict[str, Any] | None) -> Iterator[tuple[list[Any], int]]:
    """Every place where a post-processor writes an id: the list, and the index in it."""
    for part in _parts(processor):
        if part["type"] == "TemplateProcessing":
            for token in part["special_tokens"].values():
                yield from ((token["ids"], at) for at in range(len(token["ids"])))
        if part["type"] in ("BertProcessing", "RobertaProcessing"):
            yield from ((part[name], 1) for name in ("sep", "cls"))  # pairs of token and id


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges, best first, from either spelling: ``"a b"`` or ``["a", "b"]``."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def _bpe_needs(model: dict[str, Any], kept: set[str]) -> set[str]:
    """What the merges of kept tokens pass through, and the unknown token.

    A token comes about by the same merges wherever it stands, or one across its border would have been better ranked.
    So only the way of the token by itself counts, even where a vocabulary of SentencePiece merges every split of it.
    """
    ranks = {merge: rank for rank, merge in enumerate(_merges(model))}
    found = {model["unk_token"]} - {None}
    for token in kept:
        symbols = list(token)
        passed = set(symbols)
        while len(symbols) > 1:
            rank, at = min((ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairwise(symbols)))
            if rank == len(ranks):
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            passed.add(symbols[at])
        if symbols == [token]:  # others are found whole or never
            found |= passed
    return found


def _trim_bpe(model: dict[str, Any], new: dict[str, int]) -> None:
    model["merges"] = [
        written
        for written, (left, right) in zip(model["merges"], _merges(model), strict=True)
        if left in new and right in new and left + right in new
    ]
    model["vocab"] = {token: number for token, number in new.items() if token in model["vocab"]}


def _unigram_needs(model: dict[str, Any]) -> set[str]:
    """The piece of the worst score, as an unknown character costs a fixed amount more than it; the unknown token."""
    found = {min(model["vocab"], key=lambda piece: piece[1])[0]}
    return found if model["unk_id"] is None else found | {model["vocab"][model["unk_id"]][0]}


def _trim_unigram(model: dict[str, Any], new: dict[str, int]) -> None:
    if model["unk_id"] is not None:
        model["unk_id"] = new[model["vocab"][model["unk_id"]][0]]
    model["vocab"] = [piece for piece in model["vocab"] if piece[0] in new]
