import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from llama_files import CONFIG, llama_weights
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer, export, open_huggingface, save_huggingface


@pytest.fixture
def exported(tmp_path):
    return save_huggingface(tmp_path / "model", CONFIG, llama_weights())


def words(count: int) -> TextTokenizer:
    model = models.WordLevel({f"w{number}": number for number in range(count)}, unk_token="w0")
    return TextTokenizer(Tokenizer(model), {"bos": "w1", "eos": "w2"})


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and (found.tobytes() == expected.tobytes())


def beside(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.parent.iterdir())


# ---- round trips ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
def test_an_export_comes_back_bit_for_bit(dtype, tmp_path):
    original = {name: value.astype(dtype) for name, value in llama_weights().items()}
    folder = save_huggingface(tmp_path / "deep" / "model", CONFIG, original)

    config, weights = open_huggingface(folder)

    assert config == CONFIG | {"torch_dtype": np.dtype(dtype).name}
    assert set(weights) == set(original)
    for name, expected in original.items():
        assert weights.shape(name) == expected.shape and weights.dtype(name) == expected.dtype
        assert same(weights[name], expected), name
    assert sorted(os.listdir(folder)) == ["config.json", "generation_config.json", "model.safetensors"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    with safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_export_in_shards_comes_back_too(tmp_path):
    original = llama_weights()
    folder = save_huggingface(tmp_path / "model", CONFIG, iter(original.items()), max_shard_bytes=50_000)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in original.values())
    assert set(index["weight_map"].values()) == set(shards)

    _, weights = open_huggingface(folder)

    assert all(same(weights[name], value) for name, value in original.items())
    assert not isinstance(weights.get("nope"), np.ndarray)


def test_memory_layout_does_not_reach_the_file(tmp_path):
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = {"t": value.T, "s": value[:, ::2], "zero": np.array(3.5, np.float32), "big": value.astype(">f4")}
    _, weights = open_huggingface(save_huggingface(tmp_path / "m", CONFIG, given))
    assert same(weights["t"], np.ascontiguousarray(value.T))
    assert same(weights["s"], np.ascontiguousarray(value[:, ::2]))
    assert weights["zero"].shape == () and weights["zero"] == np.float32(3.5)
    assert np.array_equal(weights["big"], value)


def test_weights_of_one_folder_can_be_streamed_into_another(exported, tmp_path):
    config, weights = open_huggingface(exported)
    _, again = open_huggingface(save_huggingface(tmp_path / "copy", config, weights))
    assert all(same(again[name], weights[name]) for name in weights)


def test_every_file_of_an_export_has_the_ordinary_mode(exported):
    (exported.parent / "plain").write_text("")
    expected = (exported.parent / "plain").stat().st_mode
    assert {path.stat().st_mode for path in exported.iterdir()} == {expected}


def test_the_tokenizer_brings_its_files_and_ids(tmp_path):
    config = {key: value for key, value in CONFIG.items() if not key.endswith("token_id")}
    folder = save_huggingface(tmp_path / "m", config | {"eos_token_id": [7, 8]}, llama_weights(), words(40))
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(os.listdir(folder))
    found, _ = open_huggingface(folder)
    assert (found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]) == (1, [7, 8], None)
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "_from_model_config": True,
        "bos_token_id": 1,
        "eos_token_id": [7, 8],
    }


def test_a_config_of_transformers_5_is_readable_under_the_older_names(exported):
    config = {key: value for key, value in CONFIG.items() if key not in ("rope_theta", "torch_dtype")}
    config |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (exported / "config.json").write_text(json.dumps(config))
    found, _ = open_huggingface(exported)
    assert (found["torch_dtype"], found["rope_theta"]) == ("bfloat16", 5e5)


# ---- all or nothing ---------------------------------------------------------------------


def failing(after: int):
    for number, pair in enumerate(llama_weights(1).items()):
        if number == after:
            raise RuntimeError("the power went")
        yield pair


def test_a_failure_in_the_middle_leaves_nothing(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(RuntimeError, match="the power went"):
        save_huggingface(target, CONFIG, failing(5), max_shard_bytes=20_000)
    assert beside(target) == []


def test_a_failure_in_the_middle_leaves_the_earlier_export(exported):
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    with pytest.raises(RuntimeError, match="the power went"):
        save_huggingface(exported, CONFIG, failing(5), overwrite=True)
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert beside(exported) == ["model"]


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_failure_of_the_disk_leaves_the_earlier_export(step, exported, monkeypatch):
    before = (exported / "model.safetensors").read_bytes()
    real = getattr(os, step)

    def fails(*args):
        if step == "fsync" or ".partial" in str(args[0]):
            raise OSError("disk full")
        return real(*args)

    monkeypatch.setattr(os, step, fails)
    with pytest.raises(OSError, match="disk full"):
        save_huggingface(exported, CONFIG, llama_weights(1), overwrite=True)
    monkeypatch.undo()
    assert (exported / "model.safetensors").read_bytes() == before
    assert beside(exported) == ["model"]


def test_a_disk_that_is_full_for_the_weights_is_an_error_of_the_disk(exported, monkeypatch):
    """safetensors has an error of its own for it."""
    before = (exported / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(OSError, match=r"model: cannot be written: .*No space left"):
        save_huggingface(exported, CONFIG, llama_weights(1), overwrite=True)
    assert (exported / "model.safetensors").read_bytes() == before
    assert beside(exported) == ["model"]


def test_the_rest_of_a_killed_export_is_cleared_away(tmp_path):
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "model-00007.safetensors").write_bytes(b"half")
    folder = save_huggingface(tmp_path / "model", CONFIG, llama_weights())
    assert beside(folder) == ["model"]
    assert sorted(os.listdir(folder)) == ["config.json", "generation_config.json", "model.safetensors"]


def test_an_earlier_export_is_replaced_whole_and_only_when_asked(exported):
    with pytest.raises(UserError, match=r"already holds an export \(3 files\).*overwrite=True"):
        save_huggingface(exported, CONFIG, llama_weights(1))
    save_huggingface(exported, CONFIG, llama_weights(1), overwrite=True, max_shard_bytes=50_000)
    assert not (exported / "model.safetensors").exists()
    _, weights = open_huggingface(exported)
    assert same(weights["model.norm.weight"], llama_weights(1)["model.norm.weight"])
    save_huggingface(exported, CONFIG, llama_weights(2), overwrite=True)
    assert list(exported.glob("*index*")) == [] and beside(exported) == ["model"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "model").mkdir()
    assert open_huggingface(save_huggingface(tmp_path / "model", CONFIG, llama_weights()))


@pytest.mark.parametrize("name", ["thesis.tex", "model.py", "optimizer.pt"])
def test_a_folder_with_anything_else_is_never_touched(name, exported):
    (exported / name).write_text("mine")
    with pytest.raises(UserError, match=f"holds {name}, which no export writes"):
        save_huggingface(exported, CONFIG, llama_weights(), overwrite=True)
    assert (exported / name).read_text() == "mine"


def test_what_cannot_be_exported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, expected a new folder"):
        save_huggingface(tmp_path / "file", CONFIG, llama_weights())
    with pytest.raises(UserError, match="model: there are no weights to export"):
        save_huggingface(tmp_path / "model", CONFIG, {})
    with pytest.raises(UserError, match="model: tensor 'a' was given twice"):
        save_huggingface(tmp_path / "model", CONFIG, [("a", np.zeros(1)), ("a", np.zeros(1))])
    with pytest.raises(UserError, match="ids up to 40, but the config's vocab_size is 40"):
        save_huggingface(tmp_path / "model", CONFIG, llama_weights(), words(41))
    assert beside(tmp_path / "model") == ["file"]


def test_files_given_are_taken_instead_of_those_made_here(tmp_path):
    (tmp_path / "theirs").write_bytes(b'{"version": 7}')
    files = {"tokenizer.json": tmp_path / "theirs", "generation_config.json": b"{ }", "merges.txt": b"#"}
    config = {key: value for key, value in CONFIG.items() if not key.endswith("token_id")}
    folder = save_huggingface(tmp_path / "m", config, llama_weights(), words(40), files=files)
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found.keys() == {"config.json", "model.safetensors", *files}
    assert found["tokenizer.json"] == b'{"version": 7}' and found["generation_config.json"] == b"{ }"
    assert json.loads(found["config.json"])["eos_token_id"] == 2
    with pytest.raises(AssertionError):
        save_huggingface(tmp_path / "n", config, llama_weights(), files={"model.py": b""})


# ---- folders that are wrong -------------------------------------------------------------


def refused(folder: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        open_huggingface(folder)
    assert str(folder) in str(caught.value)


def test_no_folder(tmp_path):
    refused(tmp_path / "org" / "model", "is no such folder, expected a checkpoint folder on this machine")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is a file, expected a checkpoint folder")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, r"config\.json: no such file; the folder holds generation_config\.json, model\.safetensors"),
        (b"", r"config\.json: is not valid JSON"),
        (b'{"a": 1', r"config\.json: is not valid JSON \(Expecting"),
        (b"\xff\xfe", r"config\.json: is not valid JSON \('utf-8' codec"),
        (b"[1]", r"config\.json: holds a JSON list, expected an object"),
        (b'{"quantization_config": {"quant_method": "gptq"}}', "weights are quantised by gptq"),
    ],
)
def test_a_bad_config(content, match, exported):
    (exported / "config.json").unlink()
    if content is not None:
        (exported / "config.json").write_bytes(content)
    refused(exported, match)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_unread(name, exported):
    (exported / "model.safetensors").rename(exported / name)
    refused(exported, f"weights are pickled \\({name}\\), which can run code when read; expected model.safe")


def test_an_adapter_is_not_a_model(exported):
    (exported / "model.safetensors").rename(exported / "adapter_model.safetensors")
    (exported / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    refused(exported, r"holds only an adapter \(adapter_config\.json\) of some/base, expected a whole model")
    (exported / "config.json").unlink()
    refused(exported, r"holds only an adapter .*merge_and_unload")


@pytest.mark.parametrize("config", [True, False])
def test_a_gguf_file_is_given_by_its_own_path(config, exported):
    (exported / "model.safetensors").rename(exported / "small.Q8_0.gguf")
    if not config:
        (exported / "config.json").unlink()
    refused(
        exported, r"holds GGUF files \(small\.Q8_0\.gguf\).*Give the path of one of them: .*model/small\.Q8_0\.gguf"
    )


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_weights_that_were_quantised_by_older_tools(name, exported):
    (exported / name).write_text('{"bits": 4}')
    refused(exported, f"weights are quantised by {name.split('.')[0]}")


def test_no_weights(exported):
    (exported / "model.safetensors").rename(exported / "other.safetensors")
    refused(exported, r"neither model\.safetensors nor model\.safetensors\.index\.json, but .*other\.safet")


@pytest.mark.parametrize("cut", [0, 5, 300, -1], ids=str)
def test_truncated_weights(cut, exported):
    path = exported / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    refused(exported, r"model\.safetensors: is not a whole safetensors file \(.*; \d+ bytes, starting with")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"PK\x03\x04" + bytes(99), "is not a whole safetensors file"),
        (struct.pack("<Q", 1 << 62) + bytes(99), "is not a whole safetensors file"),
        (struct.pack("<Q", 40) + b"{" * 40, "is not a whole safetensors file"),
    ],
)
def test_weights_that_are_something_else(content, match, exported):
    (exported / "model.safetensors").write_bytes(content)
    refused(exported, match)


def test_a_dtype_that_is_not_read(exported):
    value = np.zeros(4, ml_dtypes.float8_e4m3fn)
    save_file({"w": value}, exported / "model.safetensors")
    refused(exported, "tensor 'w' is stored as F8_E4M3, expected one of F64, F32, F16, BF16")


@pytest.fixture
def sharded(tmp_path):
    folder = save_huggingface(tmp_path / "model", CONFIG, llama_weights(), max_shard_bytes=100_000)
    return folder, json.loads((folder / "model.safetensors.index.json").read_text())


def test_a_shard_that_is_missing(sharded):
    folder, index = sharded
    name = index["weight_map"]["model.norm.weight"]
    (folder / name).unlink()
    refused(folder, rf"{name}: no such file, but model\.safetensors\.index\.json names it")


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (
            "../model.safetensors",
            r"puts tensor 'w' in '\.\./model\.safetensors', expected the name of a file",
        ),
        (7, "puts tensor 'w' in 7, expected the name of a file"),
        ("pytorch_model-00001.bin", r"names the pickle pytorch_model-00001\.bin, which can run code"),
        ("model-00001-of-00003.safetensors", "holds no tensor 'w', but model.safetensors.index.json says so"),
    ],
)
def test_an_index_that_points_elsewhere(place, match, sharded):
    folder, index = sharded
    index["weight_map"]["w"] = place
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, match)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_an_index_without_places(content, sharded):
    (sharded[0] / "model.safetensors.index.json").write_text(content)
    refused(sharded[0], r"index\.json: has no 'weight_map', expected tensor name -> file name")
