"""Every family against transformers: random weights that it made, its hidden states and its logits."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import CONFIGS
from theirs import libraries, random_model

from spmd_distill.collectives import all_gather, all_to_all, shard_index
from spmd_distill.head.base import logits_of
from spmd_distill.interop import open_huggingface
from spmd_distill.mappers import make_mapper
from spmd_distill.models import FAMILIES, Shard, decoder, load_params
from spmd_distill.types import Batch

pytestmark = pytest.mark.parity
L = 24


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """name -> (transformers' model, folder it was saved in), made once."""
    made = {}

    def make(name: str):
        if name not in made:
            model = random_model(name, lambda key: 0.1 if "norm" in key else 0.3)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = model, folder
        return made[name]

    return make


def batch_of(kind: str) -> tuple[Batch, list[tuple[int, slice]]]:
    """Rows ``[2, L]`` and where in them the documents lie that transformers is asked about."""
    tokens = np.random.default_rng(0).integers(3, 131, (2, L)).astype(np.int32)
    positions, segments = np.tile(np.arange(L, dtype=np.int32), (2, 1)), np.ones((2, L), np.int32)
    documents = {
        "plain": [(0, slice(0, L)), (1, slice(0, L))],
        "padded": [(0, slice(0, 17)), (1, slice(7, L))],  # on the right, on the left
        "packed": [(0, slice(0, 9)), (0, slice(9, L)), (1, slice(0, 14))],
        "short": [(0, slice(0, 12)), (1, slice(0, 16))],
    }[kind]
    if kind != "plain":
        segments[:] = positions[:] = 0
        for number, (row, place) in enumerate(documents):
            segments[row, place] = number + 1
            positions[row, place] = np.arange(place.stop - place.start)
    return Batch(tokens, tokens, segments > 0, positions, segments), documents


@functools.cache
def program(folder: Path, layout_name: str) -> Callable[[Batch], tuple[np.ndarray, np.ndarray]]:
    """A batch -> hidden states and logits of a folder on a layout, ``[B, L, D]`` and ``[B, L, V]``."""
    config, weights = open_huggingface(folder)
    family = FAMILIES[config["architectures"][0]]
    sizes = family.config_from_huggingface(config)
    model, mapper = decoder(sizes), make_mapper("shard_map", layout_name)
    params, layout = load_params(model, family.rules(sizes), weights, mapper), mapper.layout

    def body(params, batch):
        out = model.apply(params, batch, Shard(layout, jnp.dtype("float32")))
        hidden = out.hidden
        for axis in reversed(layout.shared_axes):
            hidden = all_gather(hidden, axis)
        logits, _ = logits_of(out, hidden, shard_index(layout.vocab_axes) * out.unembed.shape[0])
        for axis in layout.shared_axes:  # back to this shard's own rows, with all of their columns
            logits = all_to_all(logits, axis, split=0, concat=1)
        return out.hidden, logits

    rows = layout.spec(("batch", None))
    last = layout.spec(("batch", "heads")) if layout.shared_axes else layout.spec(("batch", "vocab"))
    run = jax.jit(mapper.map(body, (model.specs(layout), rows), (rows, last)))

    def call(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        hidden, logits = run(params, batch)
        shape = batch.tokens.shape
        return np.asarray(hidden).reshape(*shape, -1), np.asarray(logits)[:, : sizes.vocab_size].reshape(*shape, -1)

    return call


def theirs(model, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    torch, _ = libraries()
    with torch.no_grad():
        out = model(torch.tensor(tokens[None], dtype=torch.long), output_hidden_states=True)
    return out.hidden_states[-1][0].numpy(), out.logits[0].numpy()


@pytest.mark.parametrize("kind", ["plain", "padded", "packed", "short"])
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_and_logits(name, kind, written):
    compare(name, kind, "single", written)


@pytest.mark.parametrize("layout_name", ["fsdp2_tp4", "tp8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_on_layouts_that_cut_them(name, layout_name, written):
    compare(name, "packed", layout_name, written)


def compare(name: str, kind: str, layout_name: str, written) -> None:
    batch, documents = batch_of(kind)
    model, folder = written(name)
    hidden, logits = program(folder, layout_name)(batch)
    for row, place in documents:
        for found, expected in zip((hidden, logits), theirs(model, batch.tokens[row, place]), strict=True):
            error = np.abs(found[row, place] - expected).max() / np.abs(expected).max()
            assert error < 1e-4, (row, place, error)
