"""Every storage format against the decoder of the gguf package, on blocks of any bytes."""

import gguf
import numpy as np
import pytest

from spmd_distill.interop import open_gguf
from spmd_distill.interop.blocks import unpack
from spmd_distill.interop.ggml import TENSOR_TYPES, UNREAD_TYPES, dequantize

KNOWN = gguf.GGMLQuantizationType.__members__
KINDS = {kind.name: kind for kind in TENSOR_TYPES.values() if kind.name in KNOWN}  # an old gguf knows fewer
BLOCKS = [name for name, kind in KINDS.items() if kind.block > 1]


def random_rows(name: str, rows: int, width: int, seed: int = 5) -> np.ndarray:
    size = width // KINDS[name].block * KINDS[name].layout.itemsize
    return np.random.default_rng(seed).integers(0, 256, size=(rows, size), dtype=np.uint8)


def theirs(raw: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(raw, KNOWN[name]), np.float32)


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    assert found.dtype == expected.dtype == np.float32 and found.shape == expected.shape
    number = ~np.isnan(expected)  # which of the many NaNs is the processor's choice
    bits = found[number].view(np.uint32), expected[number].view(np.uint32)
    return np.array_equal(np.isnan(found), ~number) and np.array_equal(*bits)


def test_codes_names_and_sizes_are_those_of_the_gguf_package():
    for code, kind in TENSOR_TYPES.items():
        if kind.name in KNOWN:
            assert KNOWN[kind.name] == code
            assert gguf.GGML_QUANT_SIZES[KNOWN[kind.name]] == (kind.block, kind.layout.itemsize)
    named = {code: kind.name for code, kind in TENSOR_TYPES.items()} | UNREAD_TYPES
    assert len(named) == len(TENSOR_TYPES) + len(UNREAD_TYPES)
    assert {code.value: code.name for code in KNOWN.values()}.items() <= named.items()


@pytest.mark.parametrize("name", BLOCKS)
def test_any_bytes_decode_to_the_bit_like_the_gguf_package(name):
    raw = random_rows(name, 300, 1024)
    expected = theirs(raw, name)
    assert np.isfinite(expected).mean() > 0.5 and len(np.unique(expected)) > 1000
    assert same_bits(dequantize(raw.tobytes(), KINDS[name], (300, 1024)), expected)


@pytest.mark.parametrize("name", BLOCKS)
def test_zero_and_largest_bytes(name):
    size = KINDS[name].layout.itemsize
    raw = np.stack([np.full(size, value, np.uint8) for value in (0, 1, 0x7B, 0x3C, 255)])
    assert same_bits(dequantize(raw.tobytes(), KINDS[name], (5, KINDS[name].block)), theirs(raw, name))


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_a_tensor_of_a_file_is_read_across_chunks(name, tmp_path):
    raw = random_rows(name, 520, 2048)  # two chunks and a part of a third
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=KNOWN[name])
    writer.add_tensor("y", np.ones((3, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = open_gguf(tmp_path / "a.gguf")
    assert (opened.tensors["x"].type, opened.tensors["x"].shape) == (name, (520, 2048))
    assert same_bits(opened.tensor("x"), theirs(raw, name))
    assert (opened.tensor("y") == 1).all()


@pytest.mark.parametrize("dtype", ["f8", "i1", "i2", "i4", "i8"])
def test_plain_numbers_become_the_nearest_float32(dtype, tmp_path):
    rng = np.random.default_rng(1)
    array = (rng.normal(size=(7, 11)) * 1e9).astype("f8") if dtype == "f8" else None
    if array is None:
        limits = np.iinfo(dtype)
        array = rng.integers(limits.min, limits.max, size=(7, 11), dtype=dtype, endpoint=True)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("x", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = open_gguf(tmp_path / "a.gguf")
    assert opened.tensors["x"].type == dtype[0].upper() + str(8 * int(dtype[1]))
    expected = np.array([[np.float32(value) for value in row] for row in array])
    assert same_bits(opened.tensor("x"), expected)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("run", [1, 4, 8])
def test_unpacked_integers_by_hand(bits, run):
    packed = np.random.default_rng(bits).integers(0, 256, size=(5, 16), dtype=np.uint8)
    expected = [
        [row[start + i] >> shift & (2**bits - 1) for start in range(0, 16, run) for shift in range(0, 8, bits)
         for i in range(run)]
        for row in packed.tolist()
    ]  # fmt: skip
    assert unpack(packed, bits, run).tolist() == expected
