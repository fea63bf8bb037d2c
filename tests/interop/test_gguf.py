import struct

import gguf
import numpy as np
import pytest
from llama_files import CONFIG, PAIRS, llama_tensors, llama_weights, write_gguf

from spmd_distill.errors import UserError
from spmd_distill.interop import MissingTensorError, gguf_to_huggingface, open_gguf

KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def bits(array: np.ndarray) -> np.ndarray:
    assert array.dtype == np.float32
    return array.view(np.uint32)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_values_are_those_of_the_gguf_package_to_the_bit(kind, tmp_path):
    rng = np.random.default_rng(3)
    array = (rng.normal(size=(37, 96)) * 10.0 ** rng.integers(-6, 4, size=(37, 1))).astype(np.float32)
    array[5] = 0.0
    array[6] = -np.abs(array[6])
    code = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.dequantize(gguf.quants.quantize(array, code), code)

    opened = open_gguf(write_gguf(tmp_path / "a.gguf", {"x": array}, kind=kind))

    assert opened.tensors["x"].type == kind
    assert opened.tensors["x"].shape == (37, 96)
    assert np.array_equal(bits(opened.tensor("x")), bits(np.asarray(expected, np.float32)))


def test_a_tensor_of_more_than_one_chunk_is_whole(tmp_path):
    array = np.random.default_rng(0).normal(size=(700, 1024)).astype(np.float32)
    opened = open_gguf(write_gguf(tmp_path / "a.gguf", {"x": array}, kind="Q8_0"))
    expected = gguf.quants.dequantize(
        gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
    )
    assert np.array_equal(bits(opened.tensor("x")), bits(expected))


def test_metadata_of_every_kind(tmp_path):
    pairs = {"a": 7, "b": 0.5, "c": True, "d": "täxt", "e": ["x", "yz"], "f": [1, 2, 3], "g": [0.5, 1.5]}
    opened = open_gguf(write_gguf(tmp_path / "a.gguf", {"x": np.zeros((1, 4), np.float32)}, pairs))
    assert opened.metadata["general.architecture"] == "llama"
    assert [opened.metadata[key] for key in "abcde"] == [7, 0.5, True, "täxt", ["x", "yz"]]
    assert opened.metadata["f"].tolist() == [1, 2, 3] and opened.metadata["g"].dtype == np.float32
    assert opened.get("a", float) == 7.0 and opened.get("f", list) == [1, 2, 3]
    with pytest.raises(UserError, match="'a' is 7, expected str"):
        opened.get("a", str)
    with pytest.raises(UserError, match="'c' is True, expected int"):
        opened.get("c", int)
    with pytest.raises(UserError, match="'f' is an array of 3, expected int"):
        opened.get("f", int)
    with pytest.raises(UserError, match="'nope' is missing, expected int"):
        opened.get("nope", int)
    with pytest.raises(UserError, match=r"a\.gguf: holds no tensor 'y'"):
        opened.tensor("y")


# ---- files that are wrong, byte by byte ---------------------------------------------


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str) -> bytes:
    return u64(len(value.encode())) + value.encode()


def header(tensors: int, pairs: int, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def record(name: str = "x", shape: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    """Shape in ggml's order: the fastest dimension first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def padded(*parts: bytes, data: int = 256) -> bytes:
    whole = b"".join(parts)
    return whole + bytes(-len(whole) % 32) + bytes(data)


U8, U32, STRING, ARRAY = 0, 4, 8, 9


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(key: str, kind: int, count: int) -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", kind, count))


BAD_FILES = {
    "empty": (b"", "is empty (0 bytes), expected a GGUF file"),
    "safetensors": (
        b'\x40\0\0\0\0\0\0\0{"a"',
        r"is not GGUF: it starts with b'@\x00\x00\x00', expected b'GGUF'",
    ),
    "short": (b"GG", "it starts with b'GG'"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "ggml": (b"lmgg" + bytes(40), "it starts with b'lmgg'"),
    "version 1": (header(0, 0, version=1), "is version 1, expected little-endian GGUF of version 2 or 3"),
    "version 9": (header(0, 0, version=9), "is version 9"),
    "big-endian": (header(0, 0, version=3 << 24), "a big-endian file of version 3"),
    "header only": (b"GGUF\x03\0\0\0\1", "ends inside the number of tensors: 8 bytes expected"),
    "many tensors": (header(1 << 60, 0) + bytes(99), f"claims {1 << 60} tensors, which need at least"),
    "many pairs": (header(0, 1 << 63) + bytes(99), f"claims {1 << 63} metadata pairs"),
    "long key": (header(0, 1) + u64(1 << 40) + bytes(99), "a metadata key has 1099511627776 bytes"),
    "cut key": (header(0, 1) + u64(99) + bytes(20), "ends inside a metadata key: 99 bytes expected"),
    "bad text": (header(0, 1) + pair("k", STRING, u64(3) + b"a\xff\xff"), "'k' at byte 45 is not UTF-8"),
    "value type": (
        header(0, 1) + pair("k", 77, bytes(20)),
        "metadata 'k' has value type 77, expected one of 0, 1",
    ),
    "array type": (header(0, 1) + array("k", ARRAY, 2) + bytes(99), "'k' is an array of arrays, expected numbers"),
    "long array": (header(0, 1) + array("k", U32, 1 << 61) + bytes(99), "ends inside metadata 'k'"),
    "many strings": (
        header(0, 1) + array("k", STRING, 1 << 61) + bytes(99),
        f"metadata 'k' claims {1 << 61} strings",
    ),
    "some strings": (
        header(0, 1) + array("k", STRING, 1 << 20) + bytes(99),
        f"claims {1 << 20} strings in metadata 'k', which need at least {1 << 23} bytes, but only 99 are",
    ),
    "cut strings": (
        header(0, 1) + array("k", STRING, 2) + text("abcdefgh") + b"\x09",
        "ends inside metadata 'k': 8 bytes expected from byte 65 on, 1 found",
    ),
    "long string": (
        header(0, 1) + array("k", STRING, 2) + text("ab") + u64(99) + b"ab",
        "metadata 'k': 99 bytes expected from byte 67 on, 2 found",
    ),
    "bad strings": (
        header(0, 1) + array("k", STRING, 2) + text("ab") + u64(2) + b"a\xff",
        "metadata 'k' at byte 67 is not UTF-8",
    ),
    "key twice": (header(0, 2) + 2 * pair("k", U32, bytes(4)), "metadata 'k' is there twice"),
    "alignment": (
        padded(header(1, 1), pair("general.alignment", U32, struct.pack("<I", 33)), record()),
        "'general.alignment' is 33, expected a power of two",
    ),
    "alignment 0": (
        padded(header(1, 1), pair("general.alignment", U32, bytes(4)), record()),
        "'general.alignment' is 0",
    ),
    "cut record": (header(1, 0) + record()[:-3], "ends inside tensor 'x'"),
    "no dimension": (padded(header(1, 0), record(shape=())), "tensor 'x' has 0 dimensions, expected 1"),
    "dimensions": (padded(header(1, 0), record(shape=(1,) * 9)), "tensor 'x' has 9 dimensions"),
    "zero": (padded(header(1, 0), record(shape=(32, 0))), "tensor 'x' has shape (0, 32), expected no zero"),
    "block": (padded(header(1, 0), record(shape=(33, 2), kind=8)), "for Q8_0, rows of a multiple of 32"),
    "i-quant": (
        padded(header(1, 0), record(kind=16)),
        "tensor 'x' is stored as IQ2_XXS (type 16), expected one of BF16, F16, F32, F64, I16, I32, I64, I8, IQ4_NL",
    ),
    "k-block": (padded(header(1, 0), record(kind=12)), "for Q4_K, rows of a multiple of 256"),
    "unknown": (padded(header(1, 0), record(kind=4000)), "is stored as an unknown type (type 4000)"),
    "tensor twice": (padded(header(2, 0), record(), record()), "tensor 'x' is there twice"),
    "truncated": (
        padded(header(1, 0), record(), data=255),
        "tensor 'x' (F32, shape (2, 32)) lies at bytes 96 to 352",
    ),
    "outside": (padded(header(1, 0), record(offset=1 << 50)), "and an end within the file's"),
    "huge": (padded(header(1, 0), record(shape=(1 << 62, 1 << 62))), "an end within the file's 352"),
    "unaligned": (padded(header(1, 0), record(offset=4), data=999), "a start that is a multiple of 32"),
    "overlap": (
        padded(header(2, 0), record("x"), record("y", offset=32), data=999),
        "tensor 'y' starts at byte 160, inside tensor 'x', which ends at 384",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_clear_sentence_at_once(name, tmp_path):
    content, message = BAD_FILES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        open_gguf(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_valid_neighbour_of_the_bad_files_opens(tmp_path):
    path = tmp_path / "good.gguf"
    path.write_bytes(padded(header(2, 1), array("k", U8, 0), record("x"), record("y", offset=256), data=512))
    assert open_gguf(path).tensors["y"].shape == (2, 32)
    path.write_bytes(header(0, 1, version=2) + array("k", U8, 0))
    assert open_gguf(path).metadata["k"].tolist() == []


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(UserError, match=r"nope\.gguf: no such file"):
        open_gguf(tmp_path / "nope.gguf")
    with pytest.raises(UserError, match="is a folder, expected a GGUF file"):
        open_gguf(tmp_path)


def test_no_cut_and_no_flipped_byte_raises_anything_but_a_user_error(tmp_path):
    """Every seventh prefix of a small file, and every byte changed in three ways, opens or is refused."""
    pairs = {"k": ["a", "b"], "n": [1, 2], "s": "text"}
    whole = write_gguf(tmp_path / "a.gguf", {"x": np.ones((2, 32), np.float32)}, pairs, "Q8_0").read_bytes()
    variants = [whole[:length] for length in range(1, len(whole), 7)]
    for place in range(len(whole) - 68):  # the tensor itself may hold anything
        for value in (0x00, 0xFF, whole[place] ^ 0x01):
            variants.append(whole[:place] + bytes([value]) + whole[place + 1 :])
    refused = 0
    path = tmp_path / "variant.gguf"
    for variant in variants:
        path.write_bytes(variant)
        try:
            opened = open_gguf(path)
            for name in opened.tensors:
                opened.tensor(name)
        except UserError as error:
            assert str(error).startswith(f"{path}: ")
            refused += 1
        path.unlink()
    assert refused > len(whole) // 7


# ---- to Hugging Face --------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path):
    def make(weights=None, drop=(), extra=None, architecture="llama", **pairs):
        tensors = llama_tensors(llama_weights() if weights is None else weights) | (extra or {})
        for name in drop:
            del tensors[name]
        merged = {key: value for key, value in (PAIRS | pairs).items() if value is not None}
        return open_gguf(write_gguf(tmp_path / "m.gguf", tensors, merged, architecture=architecture))

    return make


def test_a_converted_model_comes_back_bit_for_bit(llama):
    original = llama_weights()
    config, weights = gguf_to_huggingface(llama(original))
    assert config == CONFIG
    assert set(weights) == set(original) and len(weights) == len(original)
    for name, expected in original.items():
        assert weights.shape(name) == expected.shape and weights.dtype(name) == np.float32
        assert np.array_equal(bits(weights[name]), bits(expected)), name


def test_q_and_k_would_differ_without_undoing_the_interleaving(llama):
    opened = llama()
    _, weights = gguf_to_huggingface(opened)
    for name, stored in (("q", "attn_q"), ("k", "attn_k")):
        found = weights[f"model.layers.1.self_attn.{name}_proj.weight"]
        assert not np.array_equal(found, opened.tensor(f"blk.1.{stored}.weight"))


def test_an_untied_model_has_its_own_unembedding(llama):
    original = llama_weights(tied=False)
    config, weights = gguf_to_huggingface(llama(original))
    assert config["tie_word_embeddings"] is False
    assert np.array_equal(weights["lm_head.weight"], original["lm_head.weight"])


def test_metadata_that_may_be_absent(llama):
    keys = ("llama.rope.freq_base", "llama.vocab_size", "tokenizer.ggml.padding_token_id")
    config, _ = gguf_to_huggingface(llama(**dict.fromkeys(keys)))
    assert (config["rope_theta"], config["vocab_size"], config["pad_token_id"]) == (10000.0, 40, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architecture": "mamba"},
            "has architecture 'mamba', supported are gemma2, gemma3, llama, olmo2, phi3, qwen2",
        ),
        ({"split.count": 3}, "is one of 3 parts of a model"),
        (
            {"drop": ["blk.1.attn_k.weight"]},
            r"tensor 'blk.1.attn_k.weight' is missing, expected it with shape \(32, 64\)",
        ),
        ({"drop": ["token_embd.weight"]}, "'token_embd.weight' is missing"),
        (
            {"extra": {"blk.0.ffn_up.weight": np.zeros((95, 64), np.float32)}},
            r"'blk.0.ffn_up.weight' has shape \(95, 64\), expected \(96, 64\)",
        ),
        (
            {"extra": {"rope_freqs.weight": np.zeros(8, np.float32)}},
            "'rope_freqs.weight' divides the rotary frequencies by 0 to 0 in another way than Llama 3",
        ),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "'blk.0.attn_q.bias'.*no place"),
        ({"llama.block_count": None}, "'llama.block_count' is missing, expected int"),
        ({"llama.block_count": 0}, "'llama.block_count' is 0, expected 1 or more"),
        ({"llama.block_count": 3}, "'blk.2.attn_norm.weight' is missing"),
        ({"llama.block_count": 1}, "'blk.1.attn_norm.weight'.*no place"),
        ({"llama.attention.head_count": [4, 4]}, "is an array of 2, expected int"),
        ({"llama.attention.head_count_kv": 3}, "has 4 heads, 3 key-value heads"),
        ({"llama.attention.head_count_kv": 4}, r"attn_k.weight' has shape \(32, 64\), expected \(64, 64\)"),
        ({"llama.vocab_size": 50}, r"'token_embd.weight' has shape \(40, 64\), expected \(50, 64\)"),
        (
            {"llama.rope.scaling.type": "yarn"},
            "'llama.rope.scaling.type' is 'yarn', supported is only 'none'",
        ),
        ({"llama.rope.dimension_count": 8}, "'llama.rope.dimension_count' is 8, supported is only 16"),
        ({"llama.expert_count": 8}, "'llama.expert_count' is 8"),
    ],
)
def test_a_model_that_would_be_read_wrongly_is_refused(llama, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        gguf_to_huggingface(llama(**changes))
    assert "m.gguf: " in str(caught.value)


def test_weights_are_a_mapping_that_reads_on_demand(llama):
    _, weights = gguf_to_huggingface(llama())
    assert weights.source.endswith("m.gguf")
    assert list(weights) == weights.names()
    assert "model.norm.weight" in weights and "nope" not in weights
    assert weights.get("nope") is None
    assert weights["model.norm.weight"] is not weights["model.norm.weight"]
    with pytest.raises(MissingTensorError, match=r"m\.gguf: holds no tensor 'nope' \(it holds 20 tensors"):
        weights["nope"]
    with pytest.raises(KeyError):
        weights.shape("nope")


@pytest.mark.network
def test_the_real_model_is_read_to_the_bit(smollm2_gguf):
    opened = open_gguf(smollm2_gguf)
    config, weights = gguf_to_huggingface(opened)
    assert (config["num_hidden_layers"], config["hidden_size"], config["num_key_value_heads"]) == (30, 576, 3)
    assert sum(int(np.prod(weights.shape(name))) for name in weights) == 134_515_008
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        info = opened.tensors[name]
        raw = np.fromfile(smollm2_gguf, np.uint8, info.nbytes, offset=info.offset)
        code = gguf.GGMLQuantizationType[info.type]
        rows = raw.view(np.float32) if info.type == "F32" else raw.reshape(info.shape[0], -1)
        expected = gguf.quants.dequantize(rows, code)
        assert np.array_equal(bits(opened.tensor(name)), bits(np.asarray(expected, np.float32))), name
