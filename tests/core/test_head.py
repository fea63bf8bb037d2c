"""Heads against a float64 numpy oracle that upcasts before the matmul: values, both gradients and the metrics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_distill import divergences, head, mappers
from spmd_distill.collectives import psum, to_varying
from spmd_distill.divergences import CrossEntropy, ForwardKL
from spmd_distill.head import AGREEMENT, FusedHead, HeadOutput, ReferenceHead, Term
from spmd_distill.mappers import make_mapper
from spmd_distill.sharding import MeshLayout
from spmd_distill.types import LogitTransform, Unembedded

N, DS, DT, V, PADDED = 24, 8, 6, 29, 32
LAYOUTS = ["single", "dp2_tp4", "dp4_tp2", "tp8", "dp8"]
HEADS = {"reference": ReferenceHead(), "fused": FusedHead(chunk=5), "fused-auto": FusedHead()}


def problem(seed: int = 0, scale: float = 1.0, dtype=np.float64) -> dict[str, np.ndarray]:
    r = np.random.default_rng(seed)
    mask = r.random(N) < 0.7
    mask[: N // 8] = False  # the first of eight data shards sees nothing valid
    as_given = {
        "hs": r.normal(size=(N, DS)) * scale,
        "ws": r.normal(size=(PADDED, DS)),
        "ht": r.normal(size=(N, DT)) * scale,
        "wt": r.normal(size=(PADDED, DT)),
    }
    rounded = {k: np.asarray(jnp.asarray(v, dtype)) for k, v in as_given.items()}
    return rounded | {"labels": r.integers(0, V, N).astype(np.int32), "mask": mask}


def oracle(p: dict[str, np.ndarray], temperature: float, w_kl: float, w_ce: float, transform: LogitTransform):
    """Loss, gradients by hidden and unembedding, sums by name; all in float64."""
    f = {k: v.astype(np.float64) for k, v in p.items() if k[0] in "hw"}
    m = p["mask"]

    def logits(h, w):
        z = h @ w[:V].T * transform.logit_scale
        slope = np.full_like(z, transform.logit_scale)
        if transform.softcap:
            t = np.tanh(z / transform.softcap)
            z, slope = transform.softcap * t, slope * (1 - t * t)
        return z, slope

    def log_softmax(z):
        z = z - z.max(-1, keepdims=True)
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    (zs, slope), (zt, _) = logits(f["hs"], f["ws"]), logits(f["ht"], f["wt"])
    ls, lt = log_softmax(zs / temperature), log_softmax(zt / temperature)
    l1, t1 = log_softmax(zs), log_softmax(zt)
    rows = np.arange(N)
    kl = (np.exp(lt) * (lt - ls)).sum(-1)
    ce = -l1[rows, p["labels"]]
    onehot = np.eye(V)[p["labels"]]
    dz = w_kl * (np.exp(ls) - np.exp(lt)) / temperature + w_ce * (np.exp(l1) - onehot)
    dz = dz * slope * m[:, None]
    dw = np.zeros((PADDED, DS))
    dw[:V] = dz.T @ f["hs"]
    sums = {
        "forward_kl": kl,
        "ce": ce,
        "kl": (np.exp(t1) * (t1 - l1)).sum(-1),
        "ce_student": ce,
        "ce_teacher": -t1[rows, p["labels"]],
        "top1": (l1.argmax(-1) == t1.argmax(-1)).astype(float),
        "acceptance": np.minimum(np.exp(l1), np.exp(t1)).sum(-1),
    }
    sums = {k: float((v * m).sum()) for k, v in sums.items()}
    return w_kl * sums["forward_kl"] + w_ce * sums["ce"], dz @ f["ws"][:V], dw, sums


def run_head(the_head, mapper_name, layout_name, p, temperature, w_kl, w_ce, transform, static=False):
    layout = MeshLayout.load(layout_name)
    mapper = make_mapper(mapper_name, layout)
    terms = (Term(ForwardKL(), temperature if static else None), Term(CrossEntropy()))

    def body(hs, ws, ht, wt, labels, mask, weights, temperatures):
        ws = to_varying(ws, layout.batch_axes)

        def loss(hs, ws):
            out: HeadOutput = the_head(
                Unembedded(hs, ws, transform),
                Unembedded(ht, wt, LogitTransform(V, transform.logit_scale, transform.softcap)),
                labels, mask, terms, weights, temperatures, agreement=True, batch_axes=layout.batch_axes,
            )  # fmt: skip
            return out.loss, out.sums

        (value, sums), (dh, dw) = jax.value_and_grad(loss, (0, 1), has_aux=True)(hs, ws)
        value_only = loss(hs, ws)[0]
        return psum((value, value_only, sums), layout.batch_axes), dh, psum(dw, layout.batch_axes)

    tokens, vocab = layout.spec(("batch", None)), layout.spec(("vocab", None))
    row, whole = layout.spec(("batch",)), layout.spec(())
    run = jax.jit(mapper.map(body, (tokens, vocab, tokens, vocab, row, row, whole, whole), (whole, tokens, vocab)))
    arrays = [p[k] for k in ("hs", "ws", "ht", "wt", "labels", "mask")]
    acc = np.float64 if p["hs"].dtype == np.float64 else np.float32
    (value, value_only, sums), dh, dw = run(*arrays, np.asarray([w_kl, w_ce], acc), np.asarray([temperature, 1.0], acc))
    np.testing.assert_allclose(value, value_only, rtol=1e-5)
    return float(value), np.asarray(dh), np.asarray(dw), {k: float(v) for k, v in sums.items()}


def close(found, expected, tolerance, what):
    scale = max(float(np.abs(expected).max()), 1e-3)
    error = float(np.abs(np.asarray(found, np.float64) - expected).max()) / scale
    assert error <= tolerance, f"{what}: {error:.3g} > {tolerance:.3g}"


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


CASES = [(m, lay, h) for m in mappers.MAPPERS for lay in LAYOUTS for h in ("reference", "fused")]
CASES.append(("shard_map", "dp2_tp4", "fused-auto"))


@pytest.mark.parametrize(("mapper", "layout", "head_name"), CASES)
def test_every_head_under_every_mapper_equals_the_oracle(mapper, layout, head_name):
    p, transform = problem(), LogitTransform(V, 0.7, 9.0)
    found = run_head(HEADS[head_name], mapper, layout, p, 2.0, 0.9 * 4, 0.1, transform)
    loss, dh, dw, sums = oracle(p, 2.0, 0.9 * 4, 0.1, transform)
    close(found[0], loss, 1e-12, "loss")
    close(found[1], dh, 1e-12, "d hidden")
    close(found[2], dw, 1e-12, "d unembed")
    assert set(found[3]) == {"forward_kl", "ce", *AGREEMENT}
    for name, value in sums.items():
        close(found[3][name], value, 1e-12, name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 3e3])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("head_name", ["reference", "fused"])
def test_low_precision_and_extreme_logits(head_name, temperature, scale, dtype):
    p, transform = problem(scale=scale, dtype=dtype), LogitTransform(V)
    loss, dh, dw, sums = oracle(p, temperature, 1.0, 0.5, transform)
    found = run_head(
        HEADS[head_name], "shard_map", "dp2_tp4", p, temperature, 1.0, 0.5, transform, static=temperature == 1.0
    )
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in found[:3])
    # float32 rounds logits of 1e4 to 1e-3, and their probabilities with them; bfloat16 keeps 8 bits of dz
    bar = (1e-5 if scale == 1.0 else 1e-3) if dtype == jnp.float32 else 2e-2
    close(found[0], loss, 2e-5, "loss")
    close(found[1], dh, bar, "d hidden")
    close(found[2], dw, bar, "d unembed")
    close(found[3]["kl"], sums["kl"], 2e-5, "kl")


@pytest.mark.parametrize("head_name", ["reference", "fused"])
@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_masked_tokens_may_hold_anything(head_name, poison):
    p, transform = problem(), LogitTransform(V)
    args = ("shard_map", "dp2_tp4")
    clean = run_head(HEADS[head_name], *args, p, 1.5, 1.0, 1.0, transform)
    for side in ("hs", "ht"):
        p[side] = np.where(p["mask"][:, None], p[side], poison)
    dirty = run_head(HEADS[head_name], *args, p, 1.5, 1.0, 1.0, transform)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert (dirty[1][~p["mask"]] == 0).all()


@pytest.mark.parametrize("head_name", ["reference", "fused"])
def test_nothing_valid_gives_zero(head_name):
    p = problem()
    p["mask"][:] = False
    loss, dh, dw, sums = run_head(HEADS[head_name], "shard_map", "dp2_tp4", p, 2.0, 1.0, 1.0, LogitTransform(V))
    assert loss == 0 and not dh.any() and not dw.any() and not any(sums.values())


@pytest.mark.parametrize("head_name", ["reference", "fused"])
def test_a_model_that_is_its_own_teacher_has_divergence_exactly_zero(head_name):
    p = problem()
    p["ht"], p["wt"] = p["hs"], p["ws"]
    loss, dh, _, sums = run_head(HEADS[head_name], "shard_map", "dp2_tp4", p, 2.0, 1.0, 0.0, LogitTransform(V))
    # 0 up to the order in which XLA adds the two equal log-sum-exps; the integrand itself is exactly 0 at equality
    assert 0 <= loss < 1e-13 and 0 <= sums["kl"] < 1e-13
    assert np.abs(dh).max() < 1e-14
    assert sums["top1"] == p["mask"].sum()
    np.testing.assert_allclose(sums["acceptance"], p["mask"].sum())


@pytest.mark.parametrize("name", divergences.__all__)
def test_integrands_are_never_negative_and_zero_only_at_equality(name):
    divergence = getattr(divergences, name)()
    r = np.random.default_rng(0)
    z = r.normal(size=(64, 512)) * 5
    for noise in (0.0, 1e-7, 1e-4, 1e-2, 1.0):
        for dtype in (jnp.float32, jnp.float64):
            lt, ls = (jax.nn.log_softmax(jnp.asarray(x, dtype)) for x in (z, z + noise * r.normal(size=z.shape)))
            values = divergence.integrand(lt, ls)
            assert values.dtype == dtype and (values >= 0).all()
            if noise == 0:
                assert not values.any()
            elif noise >= 1e-2:
                assert (values.sum(-1) > 0).all()


def test_the_chunk_follows_the_memory_budget():
    size = functools.partial(FusedHead(memory_budget=6 * 4 * 1000 * 64).chunk_size, vocab=1000)
    assert size(tokens=4096) == 64
    assert size(tokens=10) == 10
    assert size(tokens=100) == 56, "two even chunks, not 64 and 36"
    assert FusedHead(memory_budget=1).chunk_size(4096, 50_000) == 8
    assert FusedHead(chunk=7).chunk_size(4096, 50_000) == 7


def test_every_exported_head_is_under_test():
    exported = {getattr(head, n) for n in head.__all__}
    assert exported == {type(h) for h in HEADS.values()} == set(head.HEADS.values())
