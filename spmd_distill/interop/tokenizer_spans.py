"""Which bytes of a text each of its tokens stands for."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int32, Int64
from tokenizers import Encoding, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class ByteSpans:
    """Encodes with a tokenizer and tells the bytes of every token.

    The library counts characters: the three tokens of one emoji all get the whole emoji, and some tokenizers
    leave the blank of " word" out. Here every byte of the text belongs to exactly one token, except that a
    character which neither the vocabulary nor the normaliser tells apart belongs whole to each token that has a
    part of it.

    Args:
        tokenizer: Is not changed. What is said of its post-processor holds for those that only add tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        whole = json.loads(tokenizer.to_str())
        self._byte_level = "ByteLevel" in json.dumps([whole["pre_tokenizer"], whole["normalizer"]])
        self._added = {token["content"] for token in whole["added_tokens"]}
        self._tokenizer = tokenizer
        # A post-processor may cut blanks off the offsets; without one they are whole.
        self._bare = Tokenizer.from_str(json.dumps(whole | {"post_processor": None}))
        self._bare.no_truncation()
        self._bare.no_padding()

    def encode(self, text: str, add_special_tokens: bool) -> tuple[Int32[np.ndarray, " n"], Int64[np.ndarray, "n 2"]]:
        """The ids of a text and, for each, its first byte and the one after its last.

        Tokens that the tokenizer adds of its own accord have no byte: their span is empty, where they stand.
        """
        bare = self._bare.encode(text, add_special_tokens=False)
        spans = self._spans(text, bare)
        ids = np.array(bare.ids, np.int32)
        if not add_special_tokens:
            return ids, spans
        full = self._tokenizer.encode(text, add_special_tokens=True)
        own = np.array(full.special_tokens_mask, bool)
        full_ids = np.array(full.ids, np.int32)
        assert np.array_equal(full_ids[~own], ids), "a post-processor that changes tokens"
        placed = np.zeros((len(own), 2), np.int64)
        placed[~own] = spans
        behind = np.cumsum(~own) == len(ids)
        placed[own & behind] = len(text.encode())
        return full_ids, placed

    def _spans(self, text: str, encoding: Encoding) -> Int64[np.ndarray, "n 2"]:
        at = byte_offsets(text)
        characters = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        spans = at[characters]
        if len(spans):
            shares = np.append(characters[1:, 0] < np.maximum.accumulate(characters[:-1, 1]), False)
            for first in map(int, np.flatnonzero(shares & ~np.append(False, shares[:-1]))):  # of a run that shares
                last = first + int(np.argmin(shares[first:])) + 1
                self._divide(spans, first, last, encoding.tokens)
        # What the normaliser swallowed (the accent of an "é" in two characters) goes with what stands before it.
        if len(spans):
            spans[:-1, 1] = np.maximum(spans[:-1, 1], spans[1:, 0])
            spans[0, 0] = 0
            spans[-1, 1] = at[-1]
        return spans

    def _divide(self, spans: np.ndarray, first: int, last: int, tokens: Sequence[str]) -> None:
        """Give tokens that share a character their own bytes of it, where their strings tell how many."""
        start, end = spans[first:last, 0].min(), spans[first:last, 1].max()
        counts: list[int] = []
        for token in tokens[first:last]:
            count = self._bytes_of(token)
            if count is None:
                return
            counts.append(count)
        if sum(counts) == end - start + 1 and tokens[first].startswith("▁"):
            counts[0] -= 1  # a blank that the normaliser puts before a text, so that its first word is like the others
        if sum(counts) != end - start:
            return
        ends = start + np.cumsum(np.array(counts, np.int64))
        spans[first:last, 1] = ends
        spans[first:last, 0] = np.concatenate([[start], ends[:-1]])

    def _bytes_of(self, token: str) -> int | None:
        if token in self._added:
            return len(token.encode())
        if self._byte_level:
            return len(token) if set(token) <= _alphabet() else None
        return 1 if _BYTE_TOKEN.fullmatch(token) else len(token.replace("▁", " ").encode())


def byte_offsets(text: str) -> Int64[np.ndarray, " _"]:
    """Where in the UTF-8 form of a text each of its characters begins, and where the last one ends."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


@lru_cache(maxsize=1)
def _alphabet() -> frozenset[str]:
    """The 256 characters that byte-level tokenizers write bytes as."""
    return frozenset(ByteLevel.alphabet())
