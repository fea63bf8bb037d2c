"""Examples as tokens, one after another in flat arrays that may lie on disk."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt64

from spmd_distill.data.base import Example
from spmd_distill.errors import UserError


@dataclass(frozen=True, eq=False)
class TokenTable:
    """D examples of N tokens in all: example d is ``tokens[offsets[d] : offsets[d + 1]]``."""

    tokens: Int32[np.ndarray, " N"]
    loss: Bool[np.ndarray, " N"]
    """True for tokens that the student learns to produce."""
    offsets: Int64[np.ndarray, " _"]
    """``[D + 1]``"""
    hashes: UInt64[np.ndarray, " D"]
    """A hash of each example: equal ones are copies."""
    sha256: str
    """Of the four arrays, as 64 hexadecimal digits."""
    made_of: Mapping[str, Any] = field(default_factory=dict)
    """What the tokens came from, as plain values: fingerprints of text and tokenizer, the settings that mattered."""

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        """One example, as views of the arrays."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Example(self.tokens[part], self.loss[part])

    def check_vocabulary(self, vocab_size: int, name: str) -> None:
        """Check that every id is a row of the embedding: an accelerator would clamp it without a word.

        Raises:
            UserError: names the source, the first bad example, its position and id.
        """
        block = 1 << 24
        for first in range(0, len(self.tokens), block):
            ids = self.tokens[first : first + block]
            if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
                at = first + int(np.argmax((ids >= vocab_size) | (ids < 0)))
                example = int(np.searchsorted(self.offsets, at, side="right")) - 1
                raise UserError(
                    f"{name}: example {example}, position {at - int(self.offsets[example])}: found token id "
                    f"{self.tokens[at]}, expected 0 to {vocab_size - 1} (a vocabulary of {vocab_size}). The text was "
                    "tokenised with another tokenizer than this model's: use the model's own."
                )

    @classmethod
    def of(cls, examples: Iterable[Example]) -> "TokenTable":
        """A table in memory. Raises `UserError` for an example whose arrays do not fit each other."""
        return cls(**columns(examples), sha256="").hashed()

    def hashed(self) -> "TokenTable":
        """This table with its sha256 computed."""
        digest = hashlib.sha256()
        for name in COLUMNS:
            digest.update(hashlib.sha256(np.ascontiguousarray(getattr(self, name)).data).digest())
        return TokenTable(**{**vars(self), "sha256": digest.hexdigest()})


COLUMNS = {"tokens": np.dtype("<i4"), "loss": np.dtype("?"), "offsets": np.dtype("<i8"), "hashes": np.dtype("<u8")}
"""The arrays of a table and their types."""


def columns(examples: Iterable[Example]) -> dict[str, Any]:
    """The arrays of the table of these examples. Raises `UserError` where an example's arrays do not fit."""
    tokens, loss, sizes, hashes = [], [], [0], []
    for number, example in enumerate(examples):
        ids, flags = np.asarray(example.tokens), np.asarray(example.loss)
        if ids.ndim != 1 or ids.shape != flags.shape or flags.dtype != bool or ids.dtype.kind not in "iu":
            raise UserError(
                f"example {number}: found tokens of shape {ids.shape} and type {ids.dtype} with loss of shape "
                f"{flags.shape} and type {flags.dtype}; expected integers and booleans, both [n]."
            )
        ids = ids.astype("<i4")
        tokens.append(ids)
        loss.append(flags)
        sizes.append(len(ids))
        digest = hashlib.blake2b(ids.tobytes() + flags.tobytes(), digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return {
        "tokens": np.concatenate(tokens) if tokens else np.zeros(0, "<i4"),
        "loss": np.concatenate(loss) if loss else np.zeros(0, bool),
        "offsets": np.cumsum(sizes, dtype="<i8"),
        "hashes": np.array(hashes, "<u8"),
    }
