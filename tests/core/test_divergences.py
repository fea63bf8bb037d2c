"""Divergences as formulas: textbook values, limits, the properties of the contract, and the suite that checks them."""

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracle import SEPARABLE, TERMS, Triangular, log_softmax, standardised_mse, uld

from spmd_distill import divergences as dv
from spmd_distill.divergences import Alpha, AlphaBeta, GeneralizedJSD, SkewKL, SkewReverseKL
from spmd_distill.errors import UserError
from spmd_distill.testing import check_divergence

ROWS, V = 6, 24
R = np.random.default_rng(0)
ZT, ZS = R.normal(size=(2, ROWS, V)) * 3
NEAR = ZT / 3, ZS / 3  # ratios that a mixture of 1e-4 does not change much


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def value(divergence: Any, zt: np.ndarray = ZT, zs: np.ndarray = ZS) -> np.ndarray:
    """Of every row of logits."""
    if isinstance(divergence, dv.AbstractRowwise):
        return np.asarray(divergence.per_token(jnp.asarray(zt), jnp.asarray(zs)))
    return np.asarray(divergence.integrand(*(jnp.asarray(log_softmax(z)) for z in (zt, zs))).sum(-1))


# Textbook values and limits


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # beta near an end of the convention "gkd": see below
    PARAMETERS = [
        *[GeneralizedJSD(beta, how) for beta in (0.01, 0.3, 0.5, 0.99) for how in ("gkd", "interpolation")],
        *[GeneralizedJSD(beta, "interpolation") for beta in (0, 1)],
        *[make(skew) for make in (SkewKL, SkewReverseKL) for skew in (0, 0.01, 0.5, 0.99, 1)],
        *[Alpha(a) for a in (0, 0.01, 0.3, 0.5, 0.9, 1)],
        *[AlphaBeta(a, b) for a, b in ((1, 0), (0, 1), (0.5, 0.5), (0.01, 1), (2, 0.5), (0.3, 1.5))],
        *[Triangular(a) for a in (1, 2.5)],
    ]


@pytest.mark.parametrize(
    "divergence", [d for d in (*TERMS.values(), *PARAMETERS) if not isinstance(d, dv.AbstractLabelLoss)], ids=str
)
def test_values_are_those_of_the_textbook(divergence):
    if isinstance(divergence, dv.SortedLogitULD):
        wanted = uld(ZT, ZS)
    elif isinstance(divergence, dv.NormalizedLogitMSE):
        wanted = standardised_mse(ZT, ZS, divergence.epsilon)
    else:
        wanted = SEPARABLE[type(divergence)](divergence, log_softmax(ZT), log_softmax(ZS))
    np.testing.assert_allclose(value(divergence), wanted, rtol=1e-11, atol=1e-13)


def test_families_meet_at_their_special_cases():
    forward, reverse = value(dv.ForwardKL()), value(dv.ReverseKL())
    exact = {
        "interpolation from forward KL": (GeneralizedJSD(0, "interpolation"), forward),
        "interpolation to reverse KL": (GeneralizedJSD(1, "interpolation"), reverse),
        "alpha from reverse KL": (Alpha(0), reverse),
        "alpha to forward KL": (Alpha(1), forward),
        "alpha is four times Hellinger": (Alpha(0.5), 4 * value(dv.SquaredHellinger())),
        "alpha-beta at (1, 0)": (AlphaBeta(1, 0), forward),
        "alpha-beta at (0, 1)": (AlphaBeta(0, 1), reverse),
        "alpha-beta that add up to 1": (AlphaBeta(0.3, 0.7), value(Alpha(0.3))),
        "alpha-beta exchanged": (AlphaBeta(0.7, 0.2), value(AlphaBeta(0.2, 0.7), ZS, ZT)),
        "half squared distance": (
            AlphaBeta(1, 1),
            ((np.exp(log_softmax(ZT)) - np.exp(log_softmax(ZS))) ** 2).sum(-1) / 2,
        ),
        "skew 0": (SkewKL(0), forward),
        "skew 0, reversed": (SkewReverseKL(0), reverse),
        "skew 1": (SkewKL(1), 0 * forward),
        "skew 1, reversed": (SkewReverseKL(1), 0 * forward),
        "Jensen-Shannon is symmetric": (GeneralizedJSD(0.5), value(GeneralizedJSD(0.5), ZS, ZT)),
        "a user's own": (Triangular(), value(Triangular(), ZS, ZT)),
    }
    for what, (divergence, wanted) in exact.items():
        np.testing.assert_allclose(value(divergence), wanted, rtol=1e-12, atol=1e-13, err_msg=what)


@pytest.mark.parametrize("e", [1e-4, 1e-7])
def test_limits_are_reached_without_a_jump(e):
    forward, reverse = value(dv.ForwardKL(), *NEAR), value(dv.ReverseKL(), *NEAR)
    near = [
        (GeneralizedJSD(e, "interpolation"), forward),
        (GeneralizedJSD(1 - e, "interpolation"), reverse),
        (Alpha(1 - e), forward),
        (Alpha(e), reverse),
        (AlphaBeta(1, e), forward),
        (AlphaBeta(e, 1), reverse),
        (SkewKL(e), forward),
        (SkewReverseKL(e), reverse),
    ]
    for divergence, limit in near:
        np.testing.assert_allclose(value(divergence, *NEAR), limit, rtol=100 * e, err_msg=str(divergence))


@pytest.mark.parametrize(
    ("divergence", "field", "limit"),
    [
        (GeneralizedJSD(0.5, "interpolation"), "beta", {0.0: dv.ForwardKL(), 1.0: dv.ReverseKL()}),
        (Alpha(), "alpha", {0.0: dv.ReverseKL(), 1.0: dv.ForwardKL()}),
        (SkewKL(), "skew", {0.0: dv.ForwardKL()}),
        (SkewReverseKL(), "skew", {0.0: dv.ReverseKL()}),
    ],
    ids=str,
)
def test_a_schedule_may_pass_through_the_ends(divergence, field, limit):
    """As an array, which takes another path than the number 0."""
    at = jax.jit(
        lambda x, t, s: dv.integrand_and_slope(
            dv.at(divergence, {field: x}), jax.nn.log_softmax(t), jax.nn.log_softmax(s)
        )
    )
    for end in (0.0, 1.0):
        found = at(end, *NEAR)
        assert all(np.isfinite(x).all() for x in found)
        if end in limit:
            wanted = dv.integrand_and_slope(limit[end], *map(jax.nn.log_softmax, NEAR))
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), found, wanted)


def test_both_conventions_of_jensen_shannon_and_what_signal_they_leave():
    for beta in (0.1, 0.5, 0.8):
        gkd, other = GeneralizedJSD(beta), GeneralizedJSD(beta, "interpolation")
        np.testing.assert_allclose(value(gkd), beta * (1 - beta) * value(other), rtol=1e-12)

    def gradient(divergence: Any) -> np.ndarray:
        t, z = jax.nn.log_softmax(jnp.asarray(ZT)), jnp.asarray(ZT + 1e-4 * ZS)
        return np.asarray(jax.grad(lambda z: divergence.integrand(t, jax.nn.log_softmax(z)).sum())(z))

    with pytest.warns(UserWarning, match=r"1\.0% of the gradient"):
        faint = GeneralizedJSD(0.99)
    kl_gradient = gradient(dv.ForwardKL())
    for divergence, factor in (
        (faint, 0.0099),
        (GeneralizedJSD(0.99, "interpolation"), 1),
        (Alpha(0.2), 1),
        (Alpha(0.9), 1),
    ):
        np.testing.assert_allclose(
            gradient(divergence), factor * kl_gradient, rtol=0.01, atol=1e-3 * np.abs(kl_gradient).max()
        )


@pytest.mark.parametrize("beta", [0, 0.01, 0.04, 0.96, 1])
def test_a_divergence_that_vanishes_says_so(beta):
    with pytest.warns(UserWarning, match="convention='interpolation'"):
        GeneralizedJSD(beta)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GeneralizedJSD(0.1), GeneralizedJSD(0.9), GeneralizedJSD(beta, "interpolation")
        GeneralizedJSD(lambda step: beta)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GeneralizedJSD(1.5), "beta is 1.5; expected a number between 0 and 1"),
        (lambda: SkewKL(-0.1), "SkewKL: skew is -0.1"),
        (lambda: SkewReverseKL(float("nan")), "skew is nan"),
        (lambda: Alpha(2), "Alpha: alpha is 2"),
        (lambda: AlphaBeta(0, 0), "alpha and beta are both 0"),
        (lambda: AlphaBeta(-1, 2), "alpha is -1; expected a number >= 0"),
        (lambda: dv.CrossEntropy(1.1), "label_smoothing is 1.1"),
    ],
)
def test_parameters_out_of_range_are_named(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_names_are_what_run_files_use():
    assert {name: make().name for name, make in dv.DIVERGENCES.items()} == {name: name for name in dv.DIVERGENCES}
    assert {make.__name__ for make in dv.DIVERGENCES.values()} == set(dv.__all__)
    assert Triangular().name == "triangular"


# Properties, of any distributions


SMALL, BUCKETS = (3, 8), 4
logits = hnp.arrays(np.float64, SMALL, elements=st.floats(-40, 40, width=32))
FAMILIES = {
    **{name: d for name, d in TERMS.items() if isinstance(d, dv.AbstractSeparable) and name != "own"},
    "any_jsd": GeneralizedJSD(lambda x: x),
    "any_interpolation": GeneralizedJSD(lambda x: x, "interpolation"),
    "any_skew": SkewKL(lambda x: x),
    "any_skew_reverse": SkewReverseKL(lambda x: x),
    "any_alpha": Alpha(lambda x: x),
    "any_alpha_beta": AlphaBeta(lambda x: 2 * x, 0.7),
    "any_beta_alpha": AlphaBeta(0.7, lambda x: 2 * x),
}


@jax.jit
def everything(
    zt: jax.Array, zs: jax.Array, parameter: jax.Array, member: jax.Array
) -> dict[str, dict[str, jax.Array]]:
    """All values of all families, at equality too, and of distributions whose tokens are merged."""
    t, s = jax.nn.log_softmax(zt), jax.nn.log_softmax(zs)
    merged = [jax.nn.logsumexp(x[..., None] + jnp.log(member), axis=-2) for x in (t, s)]
    merged = [jnp.maximum(x, -1e6) for x in merged]
    found = {}
    for name, family in FAMILIES.items():
        d = dv.at(family, {field: f(parameter) for field, f in dv.scheduled(family).items()})
        found[name] = {"value": d.integrand(t, s), "same": d.integrand(t, t), "merged": d.integrand(*merged).sum(-1)}
    return found


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    zt=logits,
    zs=logits,
    near=st.sampled_from([0.0, 1e-9, 1e-4, 1.0]),
    parameter=st.floats(0, 1),
    buckets=hnp.arrays(np.int64, SMALL[1], elements=st.integers(0, BUCKETS - 1)),
)
def test_never_below_zero_zero_only_at_equality_and_not_more_when_coarser(zt, zs, near, parameter, buckets):
    zs = zt + near * zs
    distance = np.abs(np.exp(log_softmax(zt)) - np.exp(log_softmax(zs))).max(-1)
    for name, found in everything(zt, zs, parameter, np.eye(BUCKETS)[buckets]).items():
        assert (found["value"] >= 0).all(), name
        assert not found["same"].any(), name
        full = np.asarray(found["value"].sum(-1))
        if name not in ("any_jsd", "any_skew", "any_skew_reverse"):  # these vanish at an end
            assert (full[distance > 1e-3] > 1e-9).all(), name
        if FAMILIES[name].coarsens:
            assert (found["merged"] <= full * (1 + 1e-9) + 1e-12).all(), name


# The suite for users


@pytest.mark.parametrize(
    "name", [n for n, d in dv.DIVERGENCES.items() if not issubclass(d, dv.AbstractLabelLoss)] + ["own"]
)
def test_every_divergence_passes_the_suite(name):
    check_divergence(TERMS[name], heads=name == "own")


def test_the_suite_takes_schedules_at_their_start_and_no_losses_on_labels():
    check_divergence(Triangular(lambda step: 1.0 + step), heads=False)
    with pytest.raises(UserError, match="CrossEntropy is neither"):
        check_divergence(dv.CrossEntropy())


@dataclass(frozen=True)
class Broken(dv.AbstractSeparable):
    """Forward KL, with one mistake."""

    mistake: str

    def integrand(self, t, s):
        p, q = jnp.exp(t), jnp.exp(s)
        right = dv.ForwardKL().integrand(t, s)
        return {
            "plain": lambda: p * (t - s),
            "log of p": lambda: jnp.abs(p * jnp.log(p / q) + q - p),
            "offset": lambda: right + 1e-3,
            "summed": lambda: right.sum(-1),
            "float32": lambda: right.astype(jnp.float32),
            "of a row": lambda: right * (1 + q.max(-1, keepdims=True)),
            "no gradient": lambda: jax.lax.stop_gradient(right),
            "nothing": lambda: 0 * right,
            "of a chunk": lambda: right * (2 if t.shape[0] == 5 else 1),
        }[self.mistake]()


class Coarsens(AlphaBeta):
    coarsens = True


class Cancels(dv.ReverseKL):
    slopes_cancel = True


class MixesRows(dv.SortedLogitULD):
    def per_token(self, teacher_logits, student_logits):
        return super().per_token(teacher_logits, student_logits[::-1]) * (1 - jnp.all(teacher_logits == student_logits))


class NotItsOwn(dv.NormalizedLogitMSE):
    def per_token(self, teacher_logits, student_logits):
        return super().per_token(teacher_logits, jax.lax.stop_gradient(student_logits))


@pytest.mark.parametrize(
    ("divergence", "complaint"),
    [
        (Broken("plain"), "Broken: never below 0, logits up to 5 at temperature 0.05, float32: -"),
        (Broken("log of p"), "Broken: finite (value|derivative), logits up to "),
        (Broken("offset"), "Broken: 0 at equality, .*: 0.001 at "),
        (Broken("summed"), r"Broken: shape, .*: \(16,\) from \(16, 29\)"),
        (Broken("float32"), "Broken: type, .*float64: float32 from float64"),
        (Broken("of a row"), "Broken: elementwise: "),
        (Broken("no gradient"), "Broken: derivative by differences: off by "),
        (Broken("nothing"), "Broken: above 0 for different distributions"),
        (Broken("of a chunk"), "Broken: FusedHead on one device and ReferenceHead agree, value: off by "),
        (Coarsens(1.5, 1.0), "Coarsens: coarsens: 29 tokens merged into "),
        (Cancels(), "Cancels: slopes_cancel: sum of the derivative: off by "),
        (MixesRows(), "MixesRows: row by row: permuted rows"),
        (NotItsOwn(), "NotItsOwn: derivative by differences"),
    ],
    ids=str,
)
def test_the_suite_names_what_is_wrong(divergence, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_divergence(divergence, heads=getattr(divergence, "mistake", "") == "of a chunk")
