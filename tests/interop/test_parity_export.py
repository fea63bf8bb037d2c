"""What we export, read by transformers itself."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from llama_files import CONFIG, PAIRS, llama_tensors, llama_weights, write_gguf
from tiny_checkpoints import read_weights, same_bits, write_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import spmd_distill as sd
from spmd_distill.collectives import shard_index
from spmd_distill.head.base import logits_of
from spmd_distill.interop import (
    TextTokenizer,
    gguf_to_huggingface,
    open_gguf,
    open_huggingface,
    save_huggingface,
    tokenizer_from_gguf,
)
from spmd_distill.models import FAMILIES, Shard
from spmd_distill.types import Batch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]  # their warnings are theirs

FIXTURE = "smollm2_logits.npz"


def load(folder):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()


def tiny_tokenizer() -> TextTokenizer:
    """Specials 0 to 2, then the letters: 29 tokens."""
    letters = {letter: 3 + number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyĠ")}
    vocab = {"<|unk|>": 0, "<|start|>": 1, "<|end|>": 2} | letters
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|unk|>", "<|start|>", "<|end|>"])
    template = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    return TextTokenizer(tokenizer, {"bos": "<|start|>", "eos": "<|end|>", "pad": "<|end|>"}, template)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shard", [50_000, 10**9], ids=["shards", "whole"])
def test_transformers_loads_an_export_without_a_missing_or_unexpected_key(tied, shard, tmp_path):
    weights = llama_weights(tied=tied)
    config = CONFIG | {"tie_word_embeddings": tied}
    folder = save_huggingface(tmp_path / "m", config, weights, tiny_tokenizer(), max_shard_bytes=shard)

    model = load(folder)

    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float32
    assert model.config.vocab_size == 40 and model.generation_config.eos_token_id == 2
    state = model.state_dict()
    for name, value in weights.items():
        assert np.array_equal(state[name].numpy(), value), name


def test_the_dtype_of_the_weights_is_the_dtype_of_the_loaded_model(tmp_path):
    weights = {name: value.astype(ml_dtypes.bfloat16) for name, value in llama_weights().items()}
    assert load(save_huggingface(tmp_path / "m", CONFIG, weights)).dtype == torch.bfloat16


def test_the_exported_tokenizer_is_the_same_in_transformers(tmp_path):
    ours = tiny_tokenizer()
    folder = save_huggingface(tmp_path / "m", CONFIG, llama_weights(), ours)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ["the cat sat", " a  b ", "<|start|>abc<|end|>"]:
        assert theirs(text)["input_ids"] == ours.encode(text).tolist()
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text)) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)
    messages = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == ours.apply_chat(messages)


def greedily(model, ids: list[int], count: int) -> list[int]:
    with torch.no_grad():
        for _ in range(count):
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_saved_here_is_in_transformers_what_it_is_there(name, tmp_path):
    """Tensors under transformers' own names, which servers go by too; the same text and the same bits back."""
    tied = name != "LlamaForCausalLM"
    weights = write_checkpoint(tmp_path / "a", name, odd=False, vocab_size=258, tie_word_embeddings=tied)
    loaded = sd.load_pretrained(tmp_path / "a", "fsdp2_tp4")
    folder = sd.save_pretrained(tmp_path / "b", loaded.model, loaded.params, like=loaded, max_shard_bytes=60_000)

    model, text = load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    model.save_pretrained(tmp_path / "theirs")
    same_bits(read_weights(tmp_path / "theirs"), weights)
    assert set(read_weights(folder)) == {n for n in model.state_dict() if not (tied and n == "lm_head.weight")}

    prompts = ["to be or not", "that is"]
    ids = [loaded.tokenizer.encode(prompt) for prompt in prompts]
    ours = sd.generate(loaded.model, loaded.params, loaded.mapper, ids, max_new_tokens=8)
    for prompt, start, found in zip(prompts, ids, ours, strict=True):
        expected = greedily(model, text(prompt)["input_ids"], 8)
        assert [*start, *found] == expected
        assert text.decode(expected) == prompt + loaded.tokenizer.decode(found)


@pytest.mark.parametrize("layout", ["single", "dp2_tp4"])
def test_some_layers_of_a_model_give_transformers_logits(layout, tmp_path):
    """A student as a run would leave it: its logits here and there."""
    write_checkpoint(tmp_path / "a", "Gemma2ForCausalLM", odd=False, vocab_size=258)
    loaded = sd.load_pretrained(tmp_path / "a", layout, layers=[2, 1])
    folder = sd.save_pretrained(tmp_path / "b", loaded.model, loaded.params, like=loaded, card=sd.ModelCard(data="x"))
    ids = np.arange(3, 43)
    with torch.no_grad():
        expected = load(folder)(torch.from_numpy(ids)[None]).logits[0].numpy()
    found = logits_of_ours(loaded, ids)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


def logits_of_ours(loaded: sd.Pretrained, ids: np.ndarray) -> np.ndarray:
    """``[L, V]``, of a batch that repeats the row."""
    layout, model = loaded.mapper.layout, loaded.model

    def body(params, batch):
        out = model.apply(params, batch, Shard(layout, jnp.dtype("float32")))
        return logits_of(out, out.hidden, shard_index(layout.vocab_axes) * out.unembed.shape[0])[0]

    tokens = np.tile(ids.astype(np.int32), (layout.batch_shards, 1))
    positions, ones = np.broadcast_to(np.arange(len(ids), dtype=np.int32), tokens.shape), np.ones_like(tokens)
    rows = layout.spec(("batch", None))
    run = loaded.mapper.map(body, (model.specs(layout), Batch(*(rows,) * 5)), layout.spec(("batch", "vocab")))
    logits = jax.jit(run)(loaded.params, Batch(tokens, tokens, ones > 0, positions, ones))
    return np.asarray(logits)[: len(ids), : model.config.vocab_size]


def test_what_transformers_saves_is_read(tmp_path):
    weights = llama_weights(tied=False)
    source = save_huggingface(tmp_path / "m", CONFIG | {"tie_word_embeddings": False}, weights)
    load(source).save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    config, found = open_huggingface(tmp_path / "theirs")
    assert set(found) == set(weights)
    assert all(np.array_equal(found[name], value) for name, value in weights.items())
    assert (config["rope_theta"], config["torch_dtype"]) == (1e5, "float32")
    for key in ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size"):
        assert config[key] == CONFIG[key]


def test_a_gguf_read_by_us_and_by_transformers_gives_the_same_logits(tmp_path):
    """Their reader knows nothing of ours; a wrong order of the rows of q or k would show here."""
    pytest.importorskip("accelerate")
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{n}" for n in range(40)]}
    vocabulary |= {"tokenizer.ggml.merges": ["t 1"]}
    pairs = PAIRS | vocabulary
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(llama_weights()), pairs, kind="Q8_0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    ours = load(save_huggingface(tmp_path / "ours", *gguf_to_huggingface(open_gguf(path))))
    tokens = torch.arange(2, 32)[None]
    with torch.no_grad():
        assert torch.allclose(ours(tokens).logits, theirs(tokens).logits, atol=1e-5)


@pytest.mark.network
def test_the_exported_teacher_has_the_stored_logits(smollm2_gguf, request, tmp_path):
    """From GGUF through our names and our export to transformers: the logits of transformers alone."""
    opened = open_gguf(smollm2_gguf)
    tokenizer = tokenizer_from_gguf(opened)
    model = load(save_huggingface(tmp_path / "m", *gguf_to_huggingface(opened), tokenizer))
    expected = np.load(request.config.rootpath / "tests" / "fixtures" / FIXTURE)
    with torch.no_grad():
        logits = model(torch.from_numpy(expected["tokens"].astype(np.int64))[None]).logits[0].numpy()
    assert np.abs(logits[:, expected["columns"]] - expected["logits"]).max() < 1e-3
    assert np.abs(logits[expected["full_positions"]] - expected["full_logits"]).max() < 1e-3
    assert np.array_equal(logits.argmax(1), expected["argmax"])
