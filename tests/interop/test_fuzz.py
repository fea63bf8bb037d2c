"""Damaged files: whatever their bytes, one sentence that names the file, and no more memory than the file deserves."""

import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llama_files import CONFIG, PAIRS, llama_tensors, llama_weights, write_gguf
from test_gguf_architectures import converted, pairs, random_weights
from test_tokenizer_gguf import BYTES

from spmd_distill.errors import UserError
from spmd_distill.interop import (
    gguf_to_huggingface,
    open_gguf,
    open_huggingface,
    save_huggingface,
    tokenizer_from_gguf,
)

NUMBERS = [0, 1, 0x7F, 0xFF, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
LETTERS = list("abcdefghijklmnopqrstuvwxyz")


def mutations(whole: bytes, head: int, count: int, seed: int) -> Iterator[bytes]:
    """Cuts, flipped bits, absurd numbers, bytes put in and taken out, most of them in the first ``head`` bytes."""
    rng = random.Random(seed)
    for _ in range(count):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            at = rng.randrange(min(head, len(damaged)) if rng.random() < 0.9 else len(damaged))
            match rng.randrange(6):
                case 0:
                    damaged[at] ^= 1 << rng.randrange(8)
                case 1:
                    damaged[at] = rng.randrange(256)
                case 2 | 3:
                    size = rng.choice([4, 8])
                    number = rng.choice(NUMBERS) % 2 ** (8 * size)
                    damaged[at : at + size] = number.to_bytes(size, "little")
                case 4:
                    del damaged[at : at + rng.randrange(1, 9)]
                case 5:
                    damaged[at:at] = rng.randbytes(rng.randrange(1, 9))
        yield bytes(damaged[: rng.randrange(1, len(damaged))] if rng.random() < 0.1 else damaged)


def survives(path: Path, variants: Iterator[bytes], use: Callable[[], None], limit: int) -> tuple[int, int]:
    """How many variants were refused and how many were read; anything but `UserError` escapes."""
    refused = read = 0
    tracemalloc.start()
    try:
        for variant in variants:
            path.unlink()  # an open mapping keeps the bytes it had
            path.write_bytes(variant)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                use()
                read += 1
            except UserError as error:
                assert str(path.parent) in str(error) and len(str(error)) < 2000
                refused += 1
            assert tracemalloc.get_traced_memory()[1] - before < limit
    finally:
        tracemalloc.stop()
    return refused, read


# ---- GGUF -------------------------------------------------------------------------------


def bytelevel(path: Path) -> Path:
    tokens = ["<unk>", "<s>", "</s>", *LETTERS, "th", "the"]
    vocabulary = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "merges": ["t h", "th e"],
        "token_type": [3, 3, 3] + [1] * 28,
    }
    given = PAIRS | {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    return write_gguf(
        path, llama_tensors(llama_weights()), given | {"tokenizer.chat_template": "{{ bos_token }}"}, "Q8_0"
    )


def sentencepiece(path: Path) -> Path:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *LETTERS, "th", "the", "<t>"]
    vocabulary = {
        "model": "llama",
        "tokens": tokens,
        "scores": [-float(n) for n in range(len(tokens))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 28 + [4],
        "bos_token_id": 1,
        "unknown_token_id": 0,
        "add_space_prefix": False,
    }
    pattern = [True, False, True]
    given = pairs("gemma2", **{"attention.sliding_window": 8, "attention.sliding_window_pattern": pattern})
    given |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    return write_gguf(path, converted("gemma2", random_weights("gemma2", True)), given, "F16", "gemma2")


@pytest.mark.parametrize("make", [bytelevel, sentencepiece])
def test_a_damaged_gguf_is_refused_or_read(make, tmp_path):
    path = make(tmp_path / "m.gguf")
    whole = path.read_bytes()
    head = min(info.offset for info in open_gguf(path).tensors.values())

    def use() -> None:
        opened = open_gguf(path)
        _, weights = gguf_to_huggingface(opened)
        for name in weights:
            assert weights[name].shape == weights.shape(name)
        tokenizer = tokenizer_from_gguf(opened)
        tokenizer.decode(tokenizer.encode("the <t> cat\n</s> ☃", add_special_tokens=True))

    use()
    refused, read = survives(path, mutations(whole, head, 150, seed=1), use, limit=3 * len(whole) + 2_000_000)
    assert refused > 50 and read > 10


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def gguf_file(tensors: int, count: int, body: bytes, data: int = 0) -> bytes:
    whole = b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + body
    return whole + bytes(-len(whole) % 32) + bytes(data)


def key(name: str, kind: int, value: bytes) -> bytes:
    return u64(len(name)) + name.encode() + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return u64(len(name)) + name.encode() + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(20_000))
ABSURD = {
    "tensors": (gguf_file(2**63, 0, b"", 99), f"claims {2**63} tensors"),
    "pairs": (gguf_file(0, 2**64 - 1, b"", 99), f"claims {2**64 - 1} metadata pairs"),
    "a key": (gguf_file(0, 1, u64(2**62), 99), f"a metadata key has {2**62} bytes"),
    "a text": (gguf_file(0, 1, key("k", 8, u64(2**62)), 99), f"ends inside metadata 'k': {2**62} bytes"),
    "a name": (gguf_file(1, 0, u64(2**62), 99), f"a tensor name has {2**62} bytes"),
    "texts": (gguf_file(0, 1, key("k", 9, struct.pack("<IQ", 8, 2**63)), 99), f"claims {2**63} strings"),
    "numbers": (gguf_file(0, 1, key("k", 9, struct.pack("<IQ", 12, 2**61)), 99), f"{2**64} bytes expected"),
    "arrays": (gguf_file(0, 1, key("k", 9, NESTED)), "metadata 'k' is an array of arrays, expected numbers or text"),
    "product": (gguf_file(1, 0, tensor("x", (2**32, 2**32), 0, 0), 64), "an end within the file's"),
    "product to 0": (gguf_file(1, 0, tensor("x", (2**62, 4, 2**63, 2), 0, 0), 64), "an end within the file's"),
    "an offset": (gguf_file(1, 0, tensor("x", (8,), 0, 2**64 - 32), 64), "an end within the file's"),
    "dimensions": (gguf_file(1, 0, u64(1) + b"x" + struct.pack("<I", 2**32 - 1), 64), "has 4294967295 dimensions"),
    "a row": (gguf_file(1, 0, tensor("x", (2**63 + 8,), 12, 0), 64), "rows of a multiple of 256"),
    "alignment": (
        gguf_file(1, 1, key("general.alignment", 10, u64(2**63)) + tensor("x", (8,), 0, 0), 64),
        "an end within the file's",
    ),
    "one place": (
        gguf_file(2, 0, tensor("x", (8,), 0, 0) + tensor("y", (8,), 0, 0), 64),
        "inside tensor 'x', which ends at",
    ),
    "inside": (
        gguf_file(3, 0, tensor("a", (8,), 0, 64) + tensor("b", (64,), 0, 0) + tensor("c", (8,), 0, 256), 512),
        "tensor 'a' starts at byte 192, inside tensor 'b'",
    ),
}


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_file_costs_nothing(name, tmp_path):
    content, message = ABSURD[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    assert len(str(caught.value)) < 600


# ---- Hugging Face folders ---------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_huggingface(tmp_path / "model", CONFIG, llama_weights(), max_shard_bytes=100_000)


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_damaged_folder_is_refused_or_read(name, folder):
    path = folder / name
    whole = path.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little") if name.endswith(".safetensors") else len(whole)

    def use() -> None:
        _, weights = open_huggingface(folder)
        for key in weights:
            assert weights[key].shape == weights.shape(key)

    use()
    refused, read = survives(path, mutations(whole, head, 120, seed=2), use, limit=2_000_000)
    assert refused > 50 and read > 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"weight_map": {"w": "' + b"x" * 5000 + b'.safetensors"}, "quantization_config": "gptq"}',
        b'{"weight_map": {"w": ".."}, "quantization_config": [1]}',
        b'{"weight_map": {"w": ""}, "quantization_config": 7}',
        b'{"weight_map": {"w": "a\\u0000b"}, "quantization_config": {"quant_method": 7}}',
        b'{"weight_map": {"w": "\\ud800"}, "quantization_config": true}',
        b'{"weight_map": {"w": "."}, "hidden_size": ' + b"9" * 10_000 + b"}",
    ],
    ids=["arrays", "objects", "long name", "parent", "no name", "zero byte", "surrogate", "digits"],
)
def test_absurd_json_is_one_sentence(name, content, folder):
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=name if content[:1] == b"[" else "model") as caught:
        open_huggingface(folder)
    assert str(folder) in str(caught.value)


HEADERS = {
    "length": u64(2**63) + b"{}",
    "empty": u64(2) + b"{}",
    "overlap": {"a": ("F32", [4], [0, 16]), "b": ("F32", [4], [8, 24])},
    "outside": {"a": ("F32", [4], [0, 2**40])},
    "backwards": {"a": ("F32", [4], [16, 0])},
    "product": {"a": ("F32", [2**40, 2**40], [0, 16])},
    "negative": {"a": ("F32", [-4], [0, 16])},
    "fraction": {"a": ("F32", [1.5], [0, 6])},
    "type": {"a": ("F33", [4], [0, 16])},
    "half bytes": {"a": ("F4", [4], [0, 2])},
}


@pytest.mark.parametrize("name", HEADERS)
def test_absurd_headers_of_safetensors(name, folder):
    header = HEADERS[name]
    if isinstance(header, dict):
        fields = ("dtype", "shape", "data_offsets")
        text = json.dumps({key: dict(zip(fields, value, strict=True)) for key, value in header.items()}).encode()
        header = u64(len(text)) + text + bytes(24)
    path = folder / "model.safetensors"
    path.write_bytes(header)
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            _, weights = open_huggingface(folder)
            if not weights:
                raise UserError(f"{path}: holds nothing")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert str(folder) in str(caught.value)
