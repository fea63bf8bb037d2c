"""Documents of any length -> rows of one length: nothing lost or repeated, no label across documents."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from spmd_distill.data.rows import Rows
from spmd_distill.errors import UserError

_INT32_MAX = int(np.iinfo(np.int32).max)


def pack(token_documents: Sequence[np.ndarray], length: int) -> Rows:
    """Lay documents one after another into rows of ``length`` tokens.

    A document that does not fit into what is left of a row goes on in the next one, as a segment of its own
    whose positions start at 0; the row's last token keeps its label, the first token of the next row. A
    document of n tokens has n - 1 labels, each of them exactly once in the result. A document of fewer than
    two tokens has none and takes no room. Only the end of the last row is padding.

    Args:
        token_documents: for each document its token ids, ``[n]``, any integer dtype. End-of-text tokens that
            the student shall learn are part of the document.
        length: tokens of a row (L).

    Returns:
        ``ceil(tokens / length)`` rows; none where no document has two tokens.

    Raises:
        UserError: ``length`` is below 1; a document is not a 1-D integer array, or has an id that is no int32
        >= 0.
    """
    if length < 1:
        raise UserError(f"row length: found {length}, expected at least 1 token (such as 512).")
    for index, document in enumerate(token_documents):
        _check_document(index, document)
    kept = [document for document in token_documents if len(document) > 1]
    total = sum(map(len, kept))
    count = -(-total // length)

    tokens = np.zeros(count * length, np.int32)
    labels = np.zeros(count * length, np.int32)
    mask = np.zeros(count * length, bool)
    starts = np.zeros(count * length, bool)
    if kept:
        ends = np.cumsum([len(document) for document in kept])
        np.concatenate(kept, out=tokens[:total], casting="unsafe")  # every id was checked
        labels[: total - 1] = tokens[1:total]
        mask[:total] = True
        labels[ends - 1] = 0
        mask[ends - 1] = False
        starts[0] = True
        starts[ends[:-1]] = True
        starts[total:] = True  # each padded token "starts" a segment: its position is 0

    starts = starts.reshape(count, length)
    starts[:, 0] = True
    columns = np.arange(length, dtype=np.int32)
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    segments.reshape(-1)[total:] = 0
    return Rows(
        tokens=tokens.reshape(count, length),
        labels=labels.reshape(count, length),
        mask=mask.reshape(count, length),
        positions=columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1, dtype=np.int32),
        segments=segments,
    )


def check_vocabulary(rows: Rows, vocab_size: int) -> None:
    """Check that every id is a row of the embedding: an accelerator would clamp it to the last one without a
    word.

    Raises:
        UserError: names the first bad row, position and id, and how many there are.
    """
    for name in ("tokens", "labels"):
        ids: Int[np.ndarray, "R L"] = getattr(rows, name)
        if ids.size == 0 or (ids.max() < vocab_size and ids.min() >= 0):
            continue
        bad = np.argwhere((ids >= vocab_size) | (ids < 0))
        row, position = map(int, bad[0])
        raise UserError(
            f"row {row}, position {position}: {name} holds id {ids[row, position]}, expected "
            f"0 to {vocab_size - 1} (a vocabulary of {vocab_size}; {len(bad)} such position(s) in all). "
            "The text was tokenised with another tokenizer than this model's: use the model's own."
        )


def _check_document(index: int, document: np.ndarray) -> None:
    if document.ndim != 1 or not np.issubdtype(document.dtype, np.integer):
        raise UserError(
            f"document {index}: found an array of shape {document.shape} and dtype {document.dtype}, "
            "expected its token ids as a 1-D integer array."
        )
    if document.size and (int(document.min()) < 0 or int(document.max()) > _INT32_MAX):
        position = int(np.argmax((document < 0) | (document > _INT32_MAX)))
        raise UserError(
            f"document {index}, position {position}: found token id {document[position]}, "
            f"expected 0 to {_INT32_MAX}. Its tokens did not come from a tokenizer."
        )
