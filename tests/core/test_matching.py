"""Which layers of two models look alike, held against CKA of all tokens' features in float64 numpy."""

from typing import Any

import jax
import numpy as np
import pytest

from spmd_distill.features.matching import layer_similarity
from spmd_distill.mappers import make_mapper
from spmd_distill.models import Shard, decoder
from spmd_distill.models.config import DecoderConfig
from spmd_distill.models.taps import Tap
from spmd_distill.sharding import REPLICATED
from spmd_distill.types import Batch

SIZES = {"vocab_size": 61, "head_dim": 4, "mlp": 16, "init_std": 0.5}
STUDENT = decoder(DecoderConfig(width=12, layers=2, heads=3, kv_heads=1, **SIZES))
TEACHER = decoder(DecoderConfig(width=20, layers=3, heads=6, kv_heads=3, **SIZES))
TAPS = ("block_output", "attention_output", "attention_heads", "queries", "keys", "values")


def batch() -> Batch:
    """Rows of two documents; masks, padding, a row without a token that counts."""
    r = np.random.default_rng(0)
    segments = np.array([[1] * 7 + [2] * 9, [1] * 16, [1] * 5 + [0] * 11, [1] * 9 + [2] * 7], np.int32)
    tokens = r.integers(0, 61, segments.shape).astype(np.int32)
    mask = (r.random(segments.shape) < 0.7) & (segments > 0)
    mask[3] = False
    positions = np.concatenate([np.arange(7), np.arange(9)]).astype(np.int32)
    return Batch(tokens, tokens, mask, np.broadcast_to(positions, segments.shape).astype(np.int32), segments)


def features(model: Any, params: Any, rows: Batch) -> dict[str, np.ndarray]:
    """``[layers, B, L, channels]`` of each tap, on one device."""
    mapper = make_mapper("vmap", "single")
    shard = Shard(mapper.layout, np.dtype("float32"))
    body = lambda p, b: model.apply_tapped(p, b, shard, dict.fromkeys(TAPS, Tap()))[1]  # noqa: E731
    run = mapper.map(body, (model.specs(mapper.layout), Batch(*(REPLICATED,) * 5)), REPLICATED)
    found = jax.device_get(jax.jit(run)(params, rows))
    return {tap: np.reshape(x, (*x.shape[:3], -1)).astype(np.float64) for tap, x in found.items()}


def cka(x: np.ndarray, y: np.ndarray) -> float:
    """Of features of the same tokens: Kornblith et al. 2019, by the Frobenius norms of covariances."""
    x, y = x - x.mean(0), y - y.mean(0)
    return np.sum((x.T @ y) ** 2) / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any, dict, dict]:
    params = [jax.device_get(m.init(jax.random.key(i))) for i, m in enumerate((STUDENT, TEACHER))]
    return *params, *(features(m, p, batch()) for m, p in zip((STUDENT, TEACHER), params, strict=True))


@pytest.mark.parametrize(
    ("mapper", "layout", "most"),
    [("vmap", "dp2_tp4", 64), ("shard_map", "sp2_tp4", 64), ("pmap", "fsdp2_tp4", 9)],
)
def test_every_layer_is_compared_with_every_other(models, mapper, layout, most):
    ours, theirs, student, teacher = models
    made, rows = make_mapper(mapper, layout), batch()
    placed = [
        jax.device_put(p, made.shardings(m.specs(made.layout)))
        for m, p in ((STUDENT, ours), (TEACHER, theirs))
    ]  # fmt: skip
    found = layer_similarity(STUDENT, placed[0], TEACHER, placed[1], made, rows, TAPS, most=most)
    chosen = np.zeros(rows.mask.shape, bool)
    for row, valid in enumerate(rows.mask):
        columns = np.flatnonzero(valid)
        count = min(len(columns), most // 4)
        chosen[row, [columns[i * (len(columns) - 1) // max(count - 1, 1)] for i in range(count)]] = True
    for tap in TAPS:
        expected = [[cka(a[chosen], b[chosen]) for b in teacher[tap]] for a in student[tap]]
        np.testing.assert_allclose(found[tap], expected, rtol=2e-5, err_msg=tap)


def test_features_that_do_not_vary_have_nothing_in_common(models):
    ours, theirs, *_ = models
    made = make_mapper("vmap", "single")
    nothing = jax.tree.map(np.zeros_like, ours)
    found = layer_similarity(STUDENT, nothing, TEACHER, theirs, made, batch(), ["block_output"])
    assert (found["block_output"] == 0).all()
