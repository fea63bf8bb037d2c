"""Distances of attention maps between our decoders, as a step has them, against the maps that transformers returns."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from theirs import libraries, random_model

from spmd_distill.collectives import psum
from spmd_distill.features import AttentionMaps, Compared, Inside, Tokens
from spmd_distill.interop import open_huggingface
from spmd_distill.mappers import make_mapper
from spmd_distill.models import FAMILIES, Shard, decoder, load_params
from spmd_distill.sharding import REPLICATED
from spmd_distill.types import Batch

pytestmark = pytest.mark.parity

L = 20
DOCUMENTS = [(0, slice(0, 8)), (0, slice(8, 20)), (1, slice(0, 15))]
LAYERS = ((0, 0), (0, 2), (1, 1))
"""Layers 0 and 2 of Gemma 2 have a window, layer 1 has none."""


def batch() -> Batch:
    tokens = np.random.default_rng(0).integers(3, 131, (2, L)).astype(np.int32)
    segments, positions = np.zeros((2, L), np.int32), np.zeros((2, L), np.int32)
    for number, (row, place) in enumerate(DOCUMENTS):
        segments[row, place] = number + 1
        positions[row, place] = np.arange(place.stop - place.start)
    mask = (segments > 0) & (np.random.default_rng(1).random((2, L)) < 0.7)
    return Batch(tokens, tokens, mask, positions, segments)


def ours(loss: AttentionMaps, folders: tuple[Path, Path], given: Batch) -> float:
    mapper = make_mapper("shard_map", "dp2_tp4")
    layout, models, params, configs = mapper.layout, [], [], []
    for folder in folders:
        config, weights = open_huggingface(folder)
        family = FAMILIES[config["architectures"][0]]
        configs.append(family.config_from_huggingface(config))
        models.append(decoder(configs[-1]))
        params.append(load_params(models[-1], family.rules(configs[-1]), weights, mapper))
    inside = Inside((Compared("maps", loss, LAYERS),), *configs)

    def body(params: Any, given: Batch) -> jax.Array:
        shard = Shard(layout, jnp.dtype("float32"))
        wanted = inside.student_taps, inside.teacher_taps
        taps = [m.apply_tapped(p, given, shard, w)[1] for m, p, w in zip(models, params, wanted, strict=True)]
        return psum(inside(*taps, Tokens(given.segments, given.mask, shard), {})["maps"], layout.batch_axes)

    specs = ([m.specs(layout) for m in models], layout.spec(("batch", None)))
    return float(jax.jit(mapper.map(body, specs, REPLICATED))(params, given))


def theirs(model: Any, tokens: np.ndarray) -> list[np.ndarray]:
    """A layer's ``[heads, L, L]``."""
    torch, _ = libraries()
    with torch.no_grad():
        out = model(torch.tensor(tokens[None], dtype=torch.long), output_attentions=True)
    return [x[0].double().numpy() for x in out.attentions]


def expected(loss: AttentionMaps, models: Any, given: Batch) -> float:
    total = 0.0
    for row, place in DOCUMENTS:
        student, teacher = (theirs(model, given.tokens[row, place]) for model in models)
        for s, t in LAYERS:
            a, b = student[s], teacher[t]
            if loss.heads == "mean":
                a, b = a.mean(0, keepdims=True), b.mean(0, keepdims=True)
            else:
                b = b[[h * len(b) // len(a) for h in range(len(a))]]
            seen = b > 0
            each = (b - a) ** 2 if loss.divergence == "mse" else b * np.log(np.where(seen, b, 1) / np.where(seen, a, 1))
            total += (each.sum(-1).mean(0) * given.mask[row, place]).sum()
    return total / len(LAYERS)


@pytest.mark.parametrize("loss", [AttentionMaps(), AttentionMaps("mse", "matched"), AttentionMaps(heads="matched")])
@pytest.mark.parametrize("names", [("smollm2", "qwen3"), ("gemma2", "gemma2")])
def test_of_two_models(names, loss, tmp_path):
    """9 and 6 heads; and a scale, a soft cap, and layers with a window."""
    models = [random_model(n, lambda key, i=i: (0.1, 0.3)["norm" not in key] * (1 + i)) for i, n in enumerate(names)]
    folders = tmp_path / "student", tmp_path / "teacher"
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
    given = batch()
    wanted = expected(loss, models, given)
    assert wanted > 0.1
    np.testing.assert_allclose(ours(loss, folders, given), wanted, rtol=1e-4)
