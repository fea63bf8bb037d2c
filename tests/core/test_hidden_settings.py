"""What a loss between hidden states declares, refuses and sends, and how a distance is added."""

import math
from collections import Counter
from typing import Any

import inside
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inside import Sizes
from test_compiled import equations

from spmd_distill.errors import UserError
from spmd_distill.features import DISTANCES, AbstractFeatureLoss, ActivationMaps, HiddenStates
from spmd_distill.features.distances import settings_of
from spmd_distill.features.hidden import pooled
from spmd_distill.features.parameters import parameters_of

STUDENT, TEACHER = Sizes(width=16), Sizes(width=24)


def kept(loss: AbstractFeatureLoss, student: int, teacher: int, pairs: int = 3) -> dict[str, np.ndarray]:
    """The parameters of a loss for so many pairs."""
    model = parameters_of({"it": (loss, pairs)}, Sizes(width=student), Sizes(width=teacher))
    return {} if model is None else jax.device_get(model.init(jax.random.key(0))["it"])


@pytest.mark.parametrize(("rows", "length"), [(8, 16), (16, 5), (8, 64)])
def test_a_projection_has_as_many_parameters_as_widths_make(rows, length):
    """131,072 a pair from 256 to 512 channels, whatever the batch and its length: it works on the channels alone."""
    loss, sizes = HiddenStates(), (Sizes(width=256), Sizes(width=512))
    (name, w), *others = kept(loss, 256, 512).items()
    assert (name, w.shape, w[0].size, others) == ("projection", (3, 256, 512), 131_072, [])
    given = inside.arrays(loss, *sizes, dtype=np.float32)
    run = inside.compiled(loss, given, "vmap", "single")
    taps = [{"block_output": jax.ShapeDtypeStruct((rows, length, n.width), np.float32)} for n in sizes]
    marks = [jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (np.int32, bool)]
    _, by_taps, by_params = jax.eval_shape(run, *taps, *marks, {"projection": w[:1]})
    assert by_params["projection"].shape == (1, 256, 512)
    assert by_taps["block_output"].shape == (rows, length, 256)


def test_which_pairs_have_a_projection_of_their_own():
    assert kept(HiddenStates(projection="shared"), 8, 16)["projection"].shape == (8, 16)
    assert kept(HiddenStates(projection="per_layer"), 8, 8)["projection"].shape == (3, 8, 8)
    for loss in (HiddenStates(), HiddenStates(projection="none")):
        assert kept(loss, 8, 8) == {}
    assert kept(HiddenStates(pool=4), 8, 16) == kept(ActivationMaps(), 8, 16) == {}


@pytest.mark.parametrize(("student", "teacher"), [(24, 40), (40, 24), (24, 24)])
def test_what_a_projection_is_born_as(student, teacher):
    few = min(student, teacher)
    for w in kept(HiddenStates(projection="per_layer"), student, teacher)["projection"]:
        short = w if student <= teacher else w.T
        np.testing.assert_allclose(short @ short.T, np.eye(few), atol=1e-5)
    a, b, _ = kept(HiddenStates(projection="per_layer"), student, teacher)["projection"]
    assert np.abs(a - b).max() > 0.1
    np.testing.assert_array_equal(
        kept(HiddenStates(projection="shared", init="identity"), few, teacher)["projection"], np.eye(few, teacher)
    )
    normal = kept(HiddenStates(projection="per_layer", init="normal"), 200, 300)["projection"]
    assert abs(normal.var() * 200 - 1) < 0.02 and abs(normal.mean()) < 1e-3


@pytest.mark.parity
@pytest.mark.parametrize(("width", "channels"), [(24, 5), (24, 8), (17, 4), (9, 9), (10, 7), (12, 1)])
def test_windows_are_those_of_torch(width, channels):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=(3, 2, width))
    wanted = torch.nn.AdaptiveAvgPool1d(channels)(torch.from_numpy(x)).numpy()
    with jax.enable_x64(True):
        np.testing.assert_allclose(pooled(jnp.asarray(x), channels), wanted, rtol=1e-13, atol=1e-14)


def test_a_new_distance_is_one_function(monkeypatch):
    """With a setting that the class has already, and on every layout."""

    def clipped(student: Any, teacher: Any, *, delta: float) -> Any:
        return jnp.minimum(jnp.abs(student - teacher), delta).sum(-1)

    monkeypatch.setitem(DISTANCES, "clipped", clipped)
    assert settings_of("clipped") == ("delta",)
    loss = HiddenStates("clipped", delta=0.5)
    given = inside.arrays(loss, TEACHER, TEACHER)
    (s,), (t,) = given.student.values(), given.teacher.values()
    with jax.enable_x64(True):
        value = inside.found(loss, given, "shard_map", "sp2_tp4").value
    assert value == pytest.approx(np.minimum(abs(s - t), 0.5)[given.valid].sum(), rel=1e-13)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: HiddenStates("l2"), "distance is 'l2'; expected one of mse, normalized_mse, cosine, huber"),
        (lambda: HiddenStates(at="keys"), "at is 'keys'; expected one of block_input, block_output"),
        (lambda: HiddenStates(projection="yes"), "is 'yes'; expected one of auto, per_layer, shared, none."),
        (lambda: HiddenStates(init="ones"), "init is 'ones'; expected one of orthogonal, normal, identity."),
        (lambda: HiddenStates(pool=0), "pool is 0; expected a number of channels, at least 1."),
        (lambda: HiddenStates(pool=4, projection="shared"), "both pool: 4 and projection: shared are given"),
        (lambda: HiddenStates("huber", delta=0), "delta is 0; expected a number above 0."),
        (lambda: HiddenStates("huber", delta=math.nan), "delta is nan; expected a number above 0."),
        (lambda: HiddenStates(delta=2.0), "delta is 2.0, but distance mse has none; leave"),
        (
            lambda: HiddenStates(pool=20).check(Sizes(width=16), TEACHER),
            "student has 16, the teacher 24; take at most 16.",
        ),
        (
            lambda: HiddenStates(projection="none").check(Sizes(width=16), TEACHER),
            "16 channels and the teacher's 24; take projection per_layer or shared, or pool, ",
        ),
        (lambda: ActivationMaps(power=0.5), "ActivationMaps: power is 0.5; expected a number from 1, such as 2."),
        (lambda: ActivationMaps(power=math.inf), "power is inf; expected"),
        (lambda: ActivationMaps(at="queries"), "ActivationMaps: at is 'queries'; expected one of block_input"),
    ],
)
def test_mistakes_are_told(make, said):
    with pytest.raises(UserError) as raised:
        make()
    assert said in str(raised.value)


# ---------------------------------------------------------------------------------------------------------------------
# What they send

B, L = 4, inside.SEGMENTS.shape[1]  # rows of one of two data shards
W, HIDDEN_GRADIENT = STUDENT.width * TEACHER.width, B * L * STUDENT.width
SENT: dict[tuple[AbstractFeatureLoss, str], tuple[dict[str, int], dict[str, int]]] = {
    # projected: each shard has tokens of its own. Whole activations get their gradient put together again
    (HiddenStates(), "dp2_tp4"): ({"all-reduce": 1}, {"all-reduce": W + HIDDEN_GRADIENT}),
    (HiddenStates(), "sp2_tp4"): ({"all-reduce": 1}, {"all-reduce": W}),
    (HiddenStates(), "dp8"): ({}, {}),
    # as they are: each shard has what it has
    (HiddenStates(pool=5), "dp2_tp4"): ({}, {}),
    (HiddenStates(pool=5), "sp2_tp4"): ({"all-reduce": 1}, {}),
    # two numbers a token, of either model
    (ActivationMaps(), "dp2_tp4"): ({}, {}),
    (ActivationMaps(), "sp2_tp4"): ({"all-reduce": 2 * 2 * B * L}, {}),
}
"""Loss and layout -> numbers that collectives over ``model`` return, in the value and in its gradient beyond that."""


@pytest.mark.parametrize(("loss", "layout"), SENT, ids=lambda x: getattr(x, "name", x))
def test_they_send_what_their_page_says(loss, layout):
    given = inside.arrays(loss, STUDENT, TEACHER, dtype=np.float32)
    arguments = given.student, given.teacher, given.segments, given.valid, inside.initial(loss, given.sizes, np.float32)
    kinds = {"psum": "all-reduce", "psum_invariant": "all-reduce", "psum2": "all-reduce"}
    found: Counter[str] = Counter()
    for equation in equations(inside.compiled(loss, given, "shard_map", layout).trace(*arguments).jaxpr.jaxpr):
        name, axes = equation.primitive.name, equation.params.get("axes", equation.params.get("axis_name"))
        if axes is not None and "model" in axes and name not in ("axis_index", "pvary", "pcast"):
            found[kinds.get(name, name)] += sum(v.aval.size for v in equation.outvars)
    assert found == sum(map(Counter, SENT[loss, layout]), Counter())
