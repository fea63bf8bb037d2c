"""How a block of each quantised ggml format becomes float32.

Small integers are packed from the low bits up: byte ``i`` of a run of ``w`` bytes holds value ``i`` in its lowest
bits, value ``w + i`` in the next, and so on (`unpack`). A plain block has 32 values and one float16 scale ``d``,
perhaps a minimum ``m``. A K-quant has 256 values in 8 or 16 groups, each with a scale (and minimum) of 4 to 8 bits
that ``d`` (and ``m``) multiply. The arithmetic is done in float32 in the order of ggml's own reference, so the result
is the same to the last bit.

Every decoder takes n records ``blocks`` of its format's layout (`ggml.TENSOR_TYPES`) and fills ``out``, float32
[n, values of a block].
"""

import numpy as np


def unpack(packed: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Take integers of 1, 2 or 4 bits apart.

    Args:
        packed: uint8 [n, bytes].
        bits: Bits of one integer.
        run: Bytes that are walked through before the next higher bits are; divides the bytes.

    Returns:
        uint8 [n, bytes * 8 / bits]: for each run, the lowest bits of its bytes, then the next.
    """
    each = 8 // bits
    runs = packed.reshape(len(packed), -1, run)
    values = np.empty((len(packed), runs.shape[1], each, run), np.uint8)
    for i in range(each):
        np.right_shift(runs, i * bits, out=values[:, :, i])
    values &= (1 << bits) - 1
    return values.reshape(len(packed), -1)


def plain(blocks: np.ndarray, out: np.ndarray) -> None:
    """Numbers as they are; what float32 cannot hold is rounded."""
    out[:, 0] = blocks


def bfloat16(blocks: np.ndarray, out: np.ndarray) -> None:
    """The upper half of a float32."""
    np.left_shift(blocks, 16, out=out.view(np.uint32)[:, 0], dtype=np.uint32)


def q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d q``, q of 8 bits."""
    np.multiply(blocks["q"], _number(blocks, "d"), out=out)


def q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d (q - 8)``, q of 4 bits."""
    np.multiply(_minus(unpack(blocks["q"], 4, 16), 8), _number(blocks, "d"), out=out)


def q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d q + m``, q of 4 bits."""
    np.multiply(unpack(blocks["q"], 4, 16), _number(blocks, "d"), out=out)
    np.add(out, _number(blocks, "m"), out=out)


def q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d (q - 16)``, q of 5 bits."""
    np.multiply(_minus(_five_bits(blocks), 16), _number(blocks, "d"), out=out)


def q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d q + m``, q of 5 bits."""
    np.multiply(_five_bits(blocks), _number(blocks, "d"), out=out)
    np.add(out, _number(blocks, "m"), out=out)


def iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d q``, q one of sixteen numbers, denser near 0."""
    np.multiply(_NONLINEAR[unpack(blocks["q"], 4, 16)], _number(blocks, "d"), out=out)


def mxfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    """``2^(e - 127) q``, q a float of 4 bits. The table holds 2 q, so the exponent is one less."""
    scale = np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128)
    np.multiply(_FLOAT4[unpack(blocks["q"], 4, 16)], scale[:, None], out=out)


def q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d s q - m t``: q of 2 bits; 16 groups with s and t of 4 bits."""
    scales = blocks["s"]
    _affine(blocks, unpack(blocks["q"], 2, 32), scales & 15, scales >> 4, out)


def q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d (s - 32) (q - 4)``: q of 3 bits; 16 groups with s of 6 bits."""
    high = unpack(blocks["h"], 1, 32) << 2
    packed = blocks["s"]
    scales = unpack(packed[:, :8], 4, 8) | unpack(packed[:, 8:], 2, 4) << 4
    _grouped(blocks, _minus(unpack(blocks["q"], 2, 32) | high, 4), _minus(scales, 32), out)


def q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d s q - m t``: q of 4 bits; 8 groups with s and t of 6 bits."""
    _affine(blocks, unpack(blocks["q"], 4, 32), *_six_bits(blocks["s"]), out)


def q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d s q - m t``: q of 5 bits; 8 groups with s and t of 6 bits."""
    high = unpack(blocks["h"], 1, 32) << 4
    _affine(blocks, unpack(blocks["q"], 4, 32) | high, *_six_bits(blocks["s"]), out)


def q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d s (q - 32)``: q of 6 bits; 16 groups with s of 8 bits."""
    high = unpack(blocks["h"], 2, 32) << 4
    _grouped(blocks, _minus(unpack(blocks["q"], 4, 64) | high, 32), blocks["s"], out)


def iq4_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d (s - 32) q``: q as in `iq4_nl`; 8 groups with s of 6 bits."""
    scales = unpack(blocks["s"], 4, 1) | unpack(blocks["h"], 2, 1) << 4
    _grouped(blocks, _NONLINEAR[unpack(blocks["q"], 4, 16)], _minus(scales, 32), out)


def tq2_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d (q - 1)``: q of 2 bits, one scale for all 256."""
    np.multiply(_minus(unpack(blocks["q"], 2, 32), 1), _number(blocks, "d"), out=out)


def tq1_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """``d (q - 1)``: q a ternary digit, five to a byte of 0.xxxxx in base 3 (the last four bytes hold four)."""
    packed = blocks["q"]
    runs = (packed[:, :32], 5), (packed[:, 32:48], 5), (packed[:, 48:], 4)
    digits = []
    for run, count in runs:
        powers = (3 ** np.arange(count)).astype(np.uint8)[:, None]
        shifted = run[:, None, :] * powers  # modulo 256: the digits already taken fall off
        digits.append(((shifted.astype(np.uint16) * 3) >> 8).reshape(len(blocks), -1))
    np.multiply(_minus(np.concatenate(digits, 1).astype(np.uint8), 1), _number(blocks, "d"), out=out)


_NONLINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    np.int8,
)
_FLOAT4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _number(blocks: np.ndarray, field: str) -> np.ndarray:
    return blocks[field].astype(np.float32)[:, None]


def _minus(values: np.ndarray, offset: int) -> np.ndarray:
    return values.view(np.int8) - np.int8(offset)


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    values = unpack(blocks["q"], 4, 16)
    values |= np.unpackbits(blocks["h"], axis=1, bitorder="little") << 4
    return values


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minima in twelve bytes: the first four of each whole, the rest in the bits left over."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], 1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], 1)
    return scales, minima


def _grouped(blocks: np.ndarray, values: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    shape = (*scales.shape, -1)
    scale = _number(blocks, "d") * scales.astype(np.float32)
    np.multiply(values.reshape(shape), scale[..., None], out=out.reshape(shape))


def _affine(blocks: np.ndarray, values: np.ndarray, scales: np.ndarray, minima: np.ndarray, out: np.ndarray) -> None:
    _grouped(blocks, values, scales, out)
    grouped = out.reshape(*minima.shape, -1)
    np.subtract(grouped, (_number(blocks, "m") * minima.astype(np.float32))[..., None], out=grouped)
