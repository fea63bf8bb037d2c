"""The real SmolLM2-135M-Instruct, on one device and on 2 x 4, against logits of the transformers implementation."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_distill.collectives import axis_index
from spmd_distill.head.base import logits_of
from spmd_distill.interop import gguf_to_huggingface, open_gguf
from spmd_distill.mappers import make_mapper
from spmd_distill.models import Shard, decoder, llama, load_params
from spmd_distill.sharding import MeshLayout
from spmd_distill.types import Batch

CHUNK = 32


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    """Made by `tests/fixtures/make_smollm2_logits.py`, which says what is what."""
    with np.load(Path(__file__).parents[1] / "fixtures" / "smollm2_logits.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def checkpoint(smollm2_gguf):
    config, weights = gguf_to_huggingface(open_gguf(smollm2_gguf))
    return llama.config_from_huggingface(config), weights


@pytest.mark.network
@pytest.mark.parametrize("layout_name", ["single", "dp2_tp4"])
def test_logits_are_those_of_transformers(layout_name, checkpoint, stored):
    config, weights = checkpoint
    model, layout = decoder(config), MeshLayout.load(layout_name)
    mapper = make_mapper("shard_map", layout)
    params = load_params(model, llama.rules(config), weights, mapper)
    tokens = np.tile(stored["tokens"], (layout.batch_shards, 1))
    length, ones = tokens.shape[1], np.ones_like(tokens)
    batch = Batch(tokens, tokens, ones > 0, np.arange(length, dtype=np.int32) * ones, ones)
    columns, full = jnp.asarray(stored["columns"]), jnp.asarray(stored["full_positions"])

    def body(params, batch):
        """For this shard's row and vocabulary: [1, length, 1, statistics] and whole logits at two places."""
        out = model.apply(params, batch, Shard(layout, jnp.dtype("float32")))
        rows = out.unembed.shape[0]
        first = axis_index("model") * rows
        here, local = (columns >= first) & (columns < first + rows), jnp.clip(columns - first, 0, rows - 1)

        def statistics(hidden):
            z, _ = logits_of(out, hidden, first)
            top, best = jnp.max(z, -1), jnp.argmax(z, -1) + first
            total = jnp.sum(jnp.exp(z - top[:, None]), -1)
            return jnp.stack([top, best.astype(z.dtype), total, *jnp.where(here, z[:, local], 0).T], -1)

        parts = jax.lax.map(statistics, out.hidden.reshape(-1, CHUNK, config.width))
        whole, _ = logits_of(out, out.hidden[full], first)
        return parts.reshape(1, length, 1, -1), whole[None]

    specs = (model.specs(layout), layout.spec(("batch",)))
    per_shard = layout.spec(("batch", None, "vocab"))
    parts, whole = jax.jit(mapper.map(body, specs, (per_shard, per_shard)))(params, batch)
    whole = np.asarray(whole)[..., : config.vocab_size]
    top, best, total, *at_columns = np.moveaxis(np.asarray(parts, np.float64), -1, 0)  # [rows, length, shards] each

    highest = top.max(-1)
    logsumexp = highest + np.log((total * np.exp(top - highest[..., None])).sum(-1))
    argmax = np.take_along_axis(best, top.argmax(-1)[..., None], -1)[..., 0].astype(int)
    logits = np.stack(at_columns, -1).sum(2)
    for row in range(len(tokens)):
        np.testing.assert_allclose(logits[row], stored["logits"], rtol=0, atol=1e-3)
        np.testing.assert_allclose(logsumexp[row], stored["logsumexp"], rtol=0, atol=1e-3)
        np.testing.assert_allclose(whole[row], stored["full_logits"], rtol=0, atol=1e-3)
        np.testing.assert_array_equal(argmax[row], stored["argmax"])
