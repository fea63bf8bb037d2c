"""The block formats of ggml tensors that we read, and how a block becomes float32.

A quantised row is a run of blocks of 32 values. A block holds one or two float16 numbers (the scale ``d``,
the minimum ``m``) and the packed integers: value ``i`` of a 4-bit block is the low half of byte ``i`` for ``i
< 16`` and the high half of byte ``i - 16`` after that; a 5-bit block adds bit ``i`` of a 32-bit word. The
arithmetic is done in float32 in the order of ggml's own reference, so the result is the same to the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_CHUNK = 1 << 19  # values decoded at a time: the temporaries stay in the processor's cache


@dataclass(frozen=True)
class TensorType:
    """A storage format: ``block`` values in ``layout.itemsize`` bytes."""

    name: str
    block: int
    layout: np.dtype
    decode: Callable[[np.ndarray, np.ndarray], None]
    """Fills ``out`` (float32 [n, block]) from n records of ``layout``."""


def _plain(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:, 0] = blocks


def _bfloat16(blocks: np.ndarray, out: np.ndarray) -> None:
    np.left_shift(blocks, 16, out=out.view(np.uint32)[:, 0], dtype=np.uint32)  # bfloat16 is the upper half


def _scale(blocks: np.ndarray, field: str = "d") -> np.ndarray:
    return blocks[field].astype(np.float32)[:, None]


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks["q"], _scale(blocks), out=out)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_nibbles(blocks).view(np.int8) - np.int8(8), _scale(blocks), out=out)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_nibbles(blocks), _scale(blocks), out=out)
    np.add(out, _scale(blocks, "m"), out=out)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_five_bits(blocks).view(np.int8) - np.int8(16), _scale(blocks), out=out)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_five_bits(blocks), _scale(blocks), out=out)
    np.add(out, _scale(blocks, "m"), out=out)


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    packed = blocks["q"]
    values = np.empty((len(blocks), 32), np.uint8)
    np.bitwise_and(packed, 15, out=values[:, :16])
    np.right_shift(packed, 4, out=values[:, 16:])
    return values


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    values = _nibbles(blocks)
    values |= np.unpackbits(blocks["h"], axis=1, bitorder="little") << 4
    return values


def _quantised(name: str, fields: list[tuple], decode: Callable[[np.ndarray, np.ndarray], None]) -> TensorType:
    return TensorType(name, 32, np.dtype(fields), decode)


_d, _m, _h, _q = ("d", "<f2"), ("m", "<f2"), ("h", "u1", 4), ("q", "u1", 16)
TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, np.dtype("<f4"), _plain),
    1: TensorType("F16", 1, np.dtype("<f2"), _plain),
    2: _quantised("Q4_0", [_d, _q], _q4_0),
    3: _quantised("Q4_1", [_d, _m, _q], _q4_1),
    6: _quantised("Q5_0", [_d, _h, _q], _q5_0),
    7: _quantised("Q5_1", [_d, _m, _h, _q], _q5_1),
    8: _quantised("Q8_0", [_d, ("q", "i1", 32)], _q8_0),
    30: TensorType("BF16", 1, np.dtype("<u2"), _bfloat16),
}
"""What can be read, by the code that a GGUF file stores."""

UNREAD_TYPES: dict[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Names of the formats that exist and that we do not read, for error messages."""


def dequantize(raw: bytes | memoryview, kind: TensorType, shape: tuple[int, ...]) -> np.ndarray:
    """Decode the bytes of one tensor.

    Args:
        raw: Exactly the tensor's bytes.
        kind: Their format.
        shape: Row-major shape; the last dimension is a multiple of ``kind.block``.

    Returns:
        A new float32 array of that shape. Beside it only a few MB are allocated.
    """
    blocks = np.frombuffer(raw, kind.layout)
    out = np.empty((len(blocks), kind.block), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale is the file's, not ours to warn about
        step = _CHUNK // kind.block
        for start in range(0, len(blocks), step):
            kind.decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)
