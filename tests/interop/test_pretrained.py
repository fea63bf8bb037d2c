"""Models in and out: every family bit for bit, the host's memory, what is wrong with a checkpoint, the hub."""

import json
import sys
import tracemalloc
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from llama_files import PAIRS, llama_tensors, llama_weights, write_gguf
from tiny_checkpoints import (
    DTYPES,
    ODD_FILES,
    byte_tokenizer,
    config_of,
    read_weights,
    same_bits,
    weights_of,
    write_checkpoint,
    write_weights,
)

import spmd_distill as sd
from spmd_distill.models import FAMILIES, decoder, export_params, load_params

LAYOUTS = ("dp2_tp4", "fsdp2_tp4", "fsdp2_sp4", "fsdp8", "single")


# ---- in and out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), list(zip(FAMILIES, cycle(LAYOUTS), strict=False)))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_tensor_of_a_family_comes_back_bit_for_bit(name, layout, tied, tmp_path):
    dtype = "bfloat16" if tied else "float32"
    weights = write_checkpoint(tmp_path / "a", name, dtype, tie_word_embeddings=tied)
    loaded = sd.load_pretrained(tmp_path / "a", layout, param_dtype=dtype)
    assert {x.dtype.name for x in jax.tree.leaves(loaded.params)} == {dtype}
    shardings = loaded.mapper.shardings(loaded.model.specs(loaded.mapper.layout))
    jax.tree.map(lambda x, s: np.testing.assert_equal(x.sharding, s), loaded.params, shardings)

    folder = sd.save_pretrained(tmp_path / "b", loaded.model, loaded.params, like=loaded, max_shard_bytes=30_000)

    assert len(list(folder.glob("*.safetensors"))) > 2
    same_bits(read_weights(folder), weights)
    theirs, ours = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "a", folder))
    assert ours == theirs


@pytest.mark.parametrize("held", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_parameters_are_held_in_the_type_that_was_chosen(stored, held, tmp_path):
    weights = write_checkpoint(tmp_path / "a", dtype=stored)
    with jax.enable_x64(held == "float64"):
        loaded = sd.load_pretrained(tmp_path / "a", "dp2_tp4", param_dtype=held)
        back = dict(export_params(loaded.params, loaded.family.rules(loaded.model.config)))
    same_bits(back, {name: array.astype(DTYPES[held]) for name, array in weights.items()})


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_some_layers_in_any_order(name, tmp_path):
    weights = write_checkpoint(tmp_path / "a", name)
    loaded = sd.load_pretrained(tmp_path / "a", "fsdp2_tp4", layers=[2, 0])
    assert loaded.model.config.layers == 2
    folder = sd.save_pretrained(tmp_path / "b", loaded.model, loaded.params, like=loaded)
    wanted = {n: w for n, w in weights.items() if "layers" not in n}
    for ours, theirs in ((0, 2), (1, 0)):
        begin = f"model.layers.{theirs}."
        wanted |= {n.replace(begin, f"model.layers.{ours}."): w for n, w in weights.items() if n.startswith(begin)}
    same_bits(read_weights(folder), wanted)
    for layers in ([], [3], [-1]):
        with pytest.raises(sd.UserError, match=r"a: layers \[.*\] were asked for; expected some of 0 to 2"):
            sd.load_pretrained(tmp_path / "a", layers=layers)


def test_the_place_may_be_a_mapper_a_layout_or_its_name(tmp_path):
    write_checkpoint(tmp_path / "a")
    layout = sd.MeshLayout.load("tp8" if len(jax.devices()) >= 8 else "single")
    for mapper in (layout, layout.name, sd.make_mapper("pmap", layout), sd.make_mapper("vmap", layout)):
        loaded = sd.load_pretrained(str(tmp_path / "a"), mapper)
        assert loaded.mapper.layout == layout
        assert loaded.mapper is mapper or loaded.mapper.name == "shard_map"


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """16 layers; the largest of their tensors, of 2 MiB, is a sixtieth of the whole."""
    folder = tmp_path_factory.mktemp("deep") / "a"
    weights = write_checkpoint(
        folder, "Qwen2ForCausalLM", num_hidden_layers=16, hidden_size=384, intermediate_size=1408,
        num_attention_heads=8, num_key_value_heads=4, head_dim=48, vocab_size=512,
    )  # fmt: skip
    largest = max(array.nbytes for array in weights.values())
    assert sum(array.nbytes for array in weights.values()) > 40 * largest
    return folder, largest


@pytest.mark.parametrize("layout", ["dp2_tp4", "fsdp2_tp4", "single"])
def test_the_host_never_holds_more_than_a_tensor_and_a_shard(deep, layout):
    folder, largest = deep
    checkpoint, mapper = sd.open_checkpoint(folder), sd.make_mapper("shard_map", layout)
    jax.block_until_ready(checkpoint.load(mapper))  # compiles, which takes memory of its own
    tracemalloc.start()
    try:
        jax.block_until_ready(checkpoint.load(mapper))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    shard = largest / mapper.layout.device_count
    # On one device a shard is a tensor, and JAX may hold one or two that it has just copied; their stack is 16.
    assert peak < (4 * largest if layout == "single" else 1.3 * (largest + shard)), (peak, largest)


class Counted:
    """Tensors that count the bytes that were read of them."""

    def __init__(self, arrays):
        self.arrays, self.read = arrays, 0

    def names(self):
        return list(self.arrays)

    def shape(self, name):
        return self.arrays[name].shape

    def dtype(self, name):
        return self.arrays[name].dtype

    def where(self, name):
        return "memory"

    def view(self, name):
        return CountedTensor(self, self.arrays[name])


class CountedTensor:
    def __init__(self, counter, array):
        self.counter, self.array, self.shape = counter, array, array.shape

    def __getitem__(self, box):
        found = self.array[box]
        self.counter.read += found.nbytes
        return found


@pytest.mark.parametrize("layout", LAYOUTS[:4])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Phi3ForCausalLM", "Olmo2ForCausalLM"])
def test_every_byte_is_read_once(name, layout):
    """However many devices hold it: replicas share what was read, and shards do not overlap."""
    config = config_of(name)
    weights = Counted(weights_of(config))
    model = decoder(FAMILIES[name].config_from_huggingface(config))
    load_params(model, FAMILIES[name].rules(model.config), weights, sd.make_mapper("shard_map", layout))
    assert weights.read == sum(array.nbytes for array in weights.arrays.values())


# ---- what is wrong with a checkpoint ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "a"
    return folder, write_checkpoint(folder, tie_word_embeddings=True)


def changed(plain, tmp_path: Path, **changes) -> Path:
    """The checkpoint with tensors added, replaced or (None) taken away, in three files."""
    source, weights = plain
    folder = tmp_path / "changed"
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = weights | {name.replace("__", "."): array for name, array in changes.items()}
    write_weights(folder, {name: array for name, array in weights.items() if array is not None}, shards=3)
    return folder


Q1 = "model__layers__1__self_attn__q_proj__weight"
WHERE = r"changed/model-0000\d-of-00003\.safetensors: "
WRONG = {
    "missing": ({Q1: None}, r"changed: the tensor 'model\.layers\.1\.self_attn\.q_proj\.weight' is missing"),
    "shape": ({Q1: np.zeros((48, 49), "f4")}, WHERE + r"tensor '.*1\.self_attn\.q_proj.weight' has shape \(48, 49\)"),
    "rank": ({Q1: np.zeros(2304, "f4")}, WHERE + r"tensor .* has shape \(2304,\), expected \(48, 48\) from the config"),
    "integers": ({Q1: np.zeros((48, 48), "i1")}, WHERE + r"tensor '.*q_proj\.weight' holds int8, expected floating"),
    "bias": (
        {"model__layers__0__self_attn__q_proj__bias": np.zeros(48, "f4")},
        WHERE + r"holds tensor 'model\.layers\.0\.self_attn\.q_proj\.bias' \(48,\), which belongs to no parameter",
    ),
    "a layer too many": (
        {"model__layers__3__input_layernorm__weight": np.zeros(48, "f4")},
        WHERE + r"holds tensor 'model\.layers\.3\.input_layernorm\.weight' \(48,\), which belongs to no parameter",
    ),
    "another head": (
        {"lm_head__weight": np.zeros((261, 48), "f4")},
        WHERE + r"holds tensor 'lm_head\.weight' .*differs from 'model\.embed_tokens\.weight'.*tie_word_embeddings",
    ),
    "a smaller head": (
        {"lm_head__weight": np.zeros((9, 48), "f4")},
        WHERE + r"holds tensor 'lm_head\.weight' \(9, 48\)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_tensor_too_few_too_many_or_of_another_shape_is_named(plain, wrong, tmp_path):
    changes, match = WRONG[wrong]
    with pytest.raises(sd.UserError, match=match):
        sd.load_pretrained(changed(plain, tmp_path, **changes))


def test_what_follows_from_the_rest_may_be_there_too(plain, tmp_path):
    harmless = {
        "model__layers__0__self_attn__rotary_emb__inv_freq": np.zeros(4, "f4"),
        "model__layers__0__attn__masked_bias": np.zeros((), "f4"),
        "lm_head__weight": plain[1]["model.embed_tokens.weight"],
    }
    loaded = sd.load_pretrained(changed(plain, tmp_path, **harmless))
    same_bits(dict(export_params(loaded.params, loaded.family.rules(loaded.model.config))), plain[1])


def test_layers_that_were_not_asked_for_are_no_mistake_but_their_strangers_are(plain, tmp_path):
    assert sd.load_pretrained(plain[0], layers=[1]).model.config.layers == 1
    odd = changed(plain, tmp_path, model__layers__2__self_attn__q_proj__bias=np.zeros(48, "f4"))
    with pytest.raises(sd.UserError, match=r"2\.self_attn\.q_proj\.bias"):
        sd.load_pretrained(odd, layers=[1])


def test_an_unknown_architecture_and_type_name_the_known_ones(plain, tmp_path):
    folder = changed(plain, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(sd.UserError, match=r"changed: architecture 'MambaForCausalLM' .* known are LlamaForCausalLM, "):
        sd.load_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"mlp_bias": True}))
    with pytest.raises(sd.UserError, match="changed: llama config: mlp_bias"):
        sd.load_pretrained(folder)
    with pytest.raises(sd.UserError, match="'int8'; expected one of float16, bfloat16, float32, float64"):
        sd.load_pretrained(plain[0], param_dtype="int8")
    with pytest.raises(sd.UserError, match="jax_enable_x64"):
        sd.load_pretrained(plain[0], param_dtype="float64")


# ---- out ----------------------------------------------------------------------------------------------------------


def test_what_came_with_the_model_is_carried_over_byte_for_byte(plain, tmp_path):
    source, _ = plain
    loaded = sd.load_pretrained(source, "dp2_tp4")
    folder = sd.save_pretrained(tmp_path / "b", loaded.model, loaded.params, like=loaded)
    for name in (*ODD_FILES, "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes(), name
    others = {"config.json", "model.safetensors", "README.md"}
    assert {p.name for p in folder.iterdir()} == {*ODD_FILES, "tokenizer.json", "tokenizer_config.json", *others}
    same_bits(read_weights(folder), plain[1])
    again = sd.load_pretrained(folder)
    assert again.tokenizer.fingerprint() == loaded.tokenizer.fingerprint()
    assert again.source.license == "mit"


def front_and_body(folder: Path) -> tuple[dict, str]:
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_says_what_it_was_told_and_what_the_source_knows(plain, tmp_path):
    loaded = sd.load_pretrained(plain[0])
    card = sd.ModelCard(
        title="Small",
        teacher="A *big* one.",
        student={"layers": (0, 2), "parameters": "5"},
        objective="kl",
        results={"KL | nats": {"before": 2.5, "after": 1 / 3}, "loss": {"after": 1.0}},
        base_model="some/base",
    )
    for given in (card, None):
        folder = sd.save_pretrained(
            tmp_path / "b", loaded.model, loaded.params, like=loaded, card=given, overwrite=given is None
        )
        front, body = front_and_body(folder)
        assert front["library_name"] == "transformers" and front["license"] == "mit"
        assert front["tags"] == ["knowledge-distillation", "spmd_distill"]
        assert front.get("base_model") == (None if given is None else "some/base")
        assert ("# Small\n" if given else "# b\n") in body
        assert str(tmp_path) not in body
    assert "##" not in body
    body = card.render("x")
    assert "## Teacher\n\nA *big* one.\n\n## Student\n\n- layers: 0, 2\n- parameters: 5\n\n## Objective" in body
    assert body.endswith(
        "## Results\n\n|  | before | after |\n|---|---|---|\n| KL \\| nats | 2.5 | 0.333333 |\n| loss |  | 1 |\n"
    )
    assert "## Data" not in body


@pytest.mark.parametrize(
    "text",
    ["", "# x", "---\nlicense: mit\n", "---\n{[\n---\n", "---\n- mit\n---\n", "---\nlicense: [mit]\n---", "\xff"],
)
def test_a_card_without_a_licence_that_can_be_read_is_no_mistake(text, plain, tmp_path):
    folder = changed(plain, tmp_path)
    (folder / "README.md").write_text(text, encoding="latin-1")
    assert sd.open_checkpoint(folder).source.license is None


def test_of_a_gguf_file_the_tokenizer_is_built(tmp_path):
    tokenizer = byte_tokenizer()
    tokens = [t for t, _ in sorted(tokenizer.vocabulary.items(), key=lambda item: item[1])][:39]
    pairs = PAIRS | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*tokens, "!!"], "tokenizer.ggml.merges": ["! !"],
        "general.license": "apache-2.0", "general.source.repo_url": "https://huggingface.co/owner/small",
    }  # fmt: skip
    write_gguf(tmp_path / "m.gguf", llama_tensors(llama_weights()), pairs)
    loaded = sd.load_pretrained(tmp_path / "m.gguf", "single")
    folder = sd.save_pretrained(tmp_path / "b", loaded.model, loaded.params, like=loaded)
    same_bits(read_weights(folder), llama_weights())
    assert sd.load_pretrained(folder).tokenizer.fingerprint() == loaded.tokenizer.fingerprint()
    front, _ = front_and_body(folder)
    assert (front["license"], front["base_model"]) == ("apache-2.0", "owner/small")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_what_is_never_overwritten(plain, tmp_path):
    loaded = sd.load_pretrained(plain[0])
    out = (loaded.model, loaded.params)
    with pytest.raises(sd.UserError, match="is where the model was loaded from"):
        sd.save_pretrained(plain[0], *out, like=loaded, overwrite=True)
    write_checkpoint(tmp_path / "theirs")
    with pytest.raises(sd.UserError, match=r"theirs: holds README\.md, which no export writes"):
        sd.save_pretrained(tmp_path / "theirs", *out, like=loaded, overwrite=True)
    sd.save_pretrained(tmp_path / "b", *out, like=loaded)
    with pytest.raises(sd.UserError, match="already holds an export"):
        sd.save_pretrained(tmp_path / "b", *out, like=loaded)
    with pytest.raises(sd.UserError, match=r"max_shard_bytes is 0"):
        sd.save_pretrained(tmp_path / "b", *out, like=loaded, overwrite=True, max_shard_bytes=0)
    sd.save_pretrained(tmp_path / "b", *out, like=sd.open_checkpoint(plain[0]), overwrite=True)
    same_bits(read_weights(tmp_path / "b"), plain[1])


# ---- the hub ------------------------------------------------------------------------------------------------------


def test_a_hub_id_is_fetched_only_when_that_is_asked_for(plain, tmp_path, monkeypatch):
    calls, said = [], []
    cached = tmp_path / "models--owner--small.model-1" / "snapshots" / "0123abcd"
    cached.mkdir(parents=True)
    for file in plain[0].iterdir():
        (cached / file.name).symlink_to(file)

    def snapshot_download(name, **how):
        calls.append((name, how))
        if how["revision"] == "gone":
            raise RuntimeError("404 Client Error\nlong story")
        return str(cached)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    monkeypatch.chdir(tmp_path)
    name = "owner/small.model-1"
    with pytest.raises(sd.UserError, match=rf"{name}: no such file or folder.*`hf download.*download=True"):
        sd.load_pretrained(name)
    assert not calls
    loaded = sd.load_pretrained(name, download=True, revision="v1", say=said.append)
    assert calls[0][0] == name and calls[0][1]["revision"] == "v1" and name in said[0]
    allowed = calls[0][1]["allow_patterns"]
    assert {"*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"} <= set(allowed)
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in allowed)
    with pytest.raises(sd.UserError, match=rf"{name} at revision 'gone': cannot be downloaded \(RuntimeError: 404 Cli"):
        sd.load_pretrained(name, download=True, revision="gone")

    folder = sd.save_pretrained(tmp_path / "b", loaded.model, loaded.params, like=loaded)
    assert front_and_body(folder)[0]["base_model"] == name
    assert sd.load_pretrained(cached).source.repository == name

    (tmp_path / "owner").mkdir()
    (tmp_path / name).symlink_to(plain[0])
    before = len(calls)
    assert sd.load_pretrained(name, download=True).source.repository is None
    assert len(calls) == before, "what is on this machine comes first"
    with pytest.raises(sd.UserError, match="is on this machine, so revision 'v1' cannot be taken"):
        sd.load_pretrained(name, revision="v1")


def test_without_the_hubs_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(sd.UserError, match=r"owner/small: .*pip install 'spmd_distill\[hub\]'"):
        sd.load_pretrained("owner/small", download=True)


@pytest.mark.parametrize("name", ["./owner/small", "a/b/c", "small.gguf", "/no/where", "../x"])
def test_a_path_is_no_hub_id(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sd.UserError, match="no such file or folder, expected a Hugging Face folder or a GGUF file"):
        sd.load_pretrained(name, download=True)
