"""The storage formats of ggml tensors that we read: how many values a block holds, its fields, and its decoder."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spmd_distill.interop import blocks

_CHUNK = 1 << 19  # values decoded at a time: the temporaries stay in the processor's cache


@dataclass(frozen=True)
class TensorType:
    """A storage format: ``block`` values in ``layout.itemsize`` bytes."""

    name: str
    block: int
    layout: np.dtype
    decode: Callable[[np.ndarray, np.ndarray], None]
    """Fills ``out`` (float32 [n, block]) from n records of ``layout``."""


def _plain(name: str, layout: str) -> TensorType:
    return TensorType(name, 1, np.dtype(layout), blocks.plain)


def _quantised(name: str, block: int, decode: Callable[[np.ndarray, np.ndarray], None], fields: str) -> TensorType:
    """``fields``: the record's parts in order, ``name:type`` or ``name:type*count``."""
    layout = []
    for field in fields.split():
        key, _, kind = field.partition(":")
        kind, _, count = kind.partition("*")
        layout.append((key, kind, int(count)) if count else (key, kind))
    return TensorType(name, block, np.dtype(layout), decode)


TENSOR_TYPES: dict[int, TensorType] = {
    0: _plain("F32", "<f4"),
    1: _plain("F16", "<f2"),
    2: _quantised("Q4_0", 32, blocks.q4_0, "d:<f2 q:u1*16"),
    3: _quantised("Q4_1", 32, blocks.q4_1, "d:<f2 m:<f2 q:u1*16"),
    6: _quantised("Q5_0", 32, blocks.q5_0, "d:<f2 h:u1*4 q:u1*16"),
    7: _quantised("Q5_1", 32, blocks.q5_1, "d:<f2 m:<f2 h:u1*4 q:u1*16"),
    8: _quantised("Q8_0", 32, blocks.q8_0, "d:<f2 q:i1*32"),
    10: _quantised("Q2_K", 256, blocks.q2_k, "s:u1*16 q:u1*64 d:<f2 m:<f2"),
    11: _quantised("Q3_K", 256, blocks.q3_k, "h:u1*32 q:u1*64 s:u1*12 d:<f2"),
    12: _quantised("Q4_K", 256, blocks.q4_k, "d:<f2 m:<f2 s:u1*12 q:u1*128"),
    13: _quantised("Q5_K", 256, blocks.q5_k, "d:<f2 m:<f2 s:u1*12 h:u1*32 q:u1*128"),
    14: _quantised("Q6_K", 256, blocks.q6_k, "q:u1*128 h:u1*64 s:i1*16 d:<f2"),
    20: _quantised("IQ4_NL", 32, blocks.iq4_nl, "d:<f2 q:u1*16"),
    23: _quantised("IQ4_XS", 256, blocks.iq4_xs, "d:<f2 h:u1*2 s:u1*4 q:u1*128"),
    24: _plain("I8", "<i1"),
    25: _plain("I16", "<i2"),
    26: _plain("I32", "<i4"),
    27: _plain("I64", "<i8"),
    28: _plain("F64", "<f8"),
    30: TensorType("BF16", 1, np.dtype("<u2"), blocks.bfloat16),
    34: _quantised("TQ1_0", 256, blocks.tq1_0, "q:u1*52 d:<f2"),
    35: _quantised("TQ2_0", 256, blocks.tq2_0, "q:u1*64 d:<f2"),
    39: _quantised("MXFP4", 32, blocks.mxfp4, "e:u1 q:u1*16"),
}
"""What can be read, by the code that a GGUF file stores."""

UNREAD_TYPES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    40: "NVFP4",
    41: "Q1_0",
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
    records = np.frombuffer(raw, kind.layout)
    out = np.empty((len(records), kind.block), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale is the file's, not ours to warn about
        step = _CHUNK // kind.block
        for start in range(0, len(records), step):
            kind.decode(records[start : start + step], out[start : start + step])
    return out.reshape(shape)
