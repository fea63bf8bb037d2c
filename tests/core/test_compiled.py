"""Contracts of the compiled step, read off the program itself: what is alive, copied, returned and sent."""

import collections
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_distill.divergences import AbstractDivergence, ForwardKL, ReverseKL
from spmd_distill.head import FusedHead
from spmd_distill.head.fused import LIVE_BUFFERS
from spmd_distill.mappers import make_mapper
from spmd_distill.models import DecoderConfig, decoder
from spmd_distill.objective import Objective
from spmd_distill.sharding import MeshLayout
from spmd_distill.state import abstract_state
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch

# No two of these sizes, or of what a layout makes of them, can be mistaken for each other. Nothing here is ever run.
VOCAB, CHUNK, ROWS, LENGTH = 32768, 128, 64, 92
STUDENT = DecoderConfig(vocab_size=VOCAB - 5, width=56, layers=3, heads=4, kv_heads=4, head_dim=6, mlp=40)
TEACHER = replace(STUDENT, width=72, layers=5)


@dataclass(frozen=True)
class Step:
    """A training step under shard_map, described without an array."""

    layout: str = "dp2_tp4"
    student: DecoderConfig = STUDENT
    teacher: DecoderConfig = TEACHER
    micro_batches: int = 1
    rows: int = ROWS
    divergence: AbstractDivergence = ForwardKL()  # noqa: RUF009 (frozen)

    @property
    def arguments(self) -> tuple[Any, Any, Batch]:
        run, tx = self._parts
        x = jax.ShapeDtypeStruct((self.micro_batches, self.rows, LENGTH), np.int32)
        mask = jax.ShapeDtypeStruct(x.shape, np.bool_)
        batch = Batch(x, x, mask, x, x)
        teacher = run.teacher.model

        def place(shapes: Any, specs: Any) -> Any:
            shardings = run.mapper.shardings(specs)
            return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, shardings)

        return (
            abstract_state(run, tx),
            place(teacher.abstract, teacher.specs(run.mapper.layout)),
            place(batch, run.batch_specs(1)),
        )

    @property
    def _parts(self) -> tuple[Distillation, optax.GradientTransformation]:
        teacher = OnlineTeacher(decoder(self.teacher))
        mapper, head = make_mapper("shard_map", self.layout), FusedHead(chunk=CHUNK)
        objective = Objective.mix(self.divergence, 0.7, 2.0)
        return Distillation(decoder(self.student), teacher, objective, mapper, head), optax.adamw(1e-3)

    @functools.cached_property
    def traced(self) -> Any:
        run, tx = self._parts
        return run.train_step(tx).trace(*self.arguments)

    @functools.cached_property
    def compiled(self) -> Any:
        return self.traced.lower().compile()


@functools.cache
def step(**settings: Any) -> Step:
    return Step(**settings)


def bytes_a_device(tree: Any) -> int:
    def one(x: jax.ShapeDtypeStruct) -> int:
        return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(map(one, jax.tree.leaves(tree)))


def shapes(text: str) -> set[tuple[int, ...]]:
    """Every array shape that is written in HLO, fused computations included."""
    return {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", text)}


def logits_among(found: set[tuple[int, ...]], vocab: set[int]) -> list[tuple[int, ...]]:
    """Shapes with a vocabulary dimension and, in all other dimensions together, more entries than a chunk."""
    flat = {v * ROWS * LENGTH // 2 for v in vocab}  # a data shard's tokens times a vocabulary, in one dimension
    return sorted(
        s for s in found if any(math.prod(s) // d > CHUNK for d in s if d in vocab) or any(d in flat for d in s)
    )


LAYOUTS = ["dp2_tp4", "fsdp2_tp4"]
SHARDS = {"dp2_tp4": 4, "fsdp2_tp4": 8}
"""Into how many pieces the vocabulary is cut: over model, or over model and data."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_state_is_updated_in_place_and_the_teacher_neither_copied_nor_returned(layout):
    state, teacher, batch = step(layout=layout).arguments
    memory = step(layout=layout).compiled.memory_analysis()
    assert memory.alias_size_in_bytes == bytes_a_device(state)
    assert memory.argument_size_in_bytes == bytes_a_device((state, teacher, batch))
    metrics = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert 0 < metrics < 1024 < bytes_a_device(teacher)
    header = step(layout=layout).compiled.as_text().splitlines()[0]
    aliased = re.findall(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)", header)
    assert [(int(out), int(given)) for out, given in aliased] == [(i, i) for i in range(len(jax.tree.leaves(state)))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_logits_of_more_than_a_chunk_are_ever_alive(layout):
    found = shapes(step(layout=layout).compiled.as_text())
    rows = VOCAB // SHARDS[layout]
    assert not logits_among(found, {VOCAB, VOCAB - 5, VOCAB // 4, rows})
    assert (CHUNK, rows) in found  # the chunk itself is seen
    assert not any(VOCAB in shape for shape in found)  # and no vocabulary is ever whole on a device


def test_logits_would_be_noticed():
    def loss(hidden, unembed):
        return jnp.sum(jax.nn.logsumexp(hidden @ unembed.T, axis=-1))

    given = jax.ShapeDtypeStruct((ROWS * LENGTH // 2, 56), "f4"), jax.ShapeDtypeStruct((VOCAB // 4, 56), "f4")
    found = shapes(jax.jit(loss).lower(*given).compile().as_text())
    assert logits_among(found, {VOCAB // 4}) == [(ROWS * LENGTH // 2, VOCAB // 4)]
    assert logits_among({(2, 97, VOCAB // 4)}, {VOCAB // 4})
    assert logits_among({(ROWS * LENGTH // 2 * VOCAB,)}, {VOCAB})


@pytest.mark.parametrize(("layout", "times"), [("dp2_tp4", 0), ("fsdp2_tp4", 0), ("fsdp2_sp4", 1)])
def test_an_unembedding_is_gathered_at_most_once_a_step(layout, times):
    """Tied to the embedding, in each model, forward and backward together; so is its gradient scattered.

    Never where its rows are cut over data too: tokens travel to them instead.
    """
    results = re.findall(r"= (.*?) all-gather(?:-start)?\(", step(layout=layout).compiled.as_text())
    gathered = [shape for result in results for shape in re.findall(r"\[[\d,]+\]", result)]
    called = collections.Counter(
        (e.primitive.name.removesuffix("_invariant"), v.aval.shape)
        for e in equations(step(layout=layout).traced.jaxpr.jaxpr)
        for v in e.outvars
    )
    for config in (STUDENT, TEACHER):
        assert gathered.count(f"[{VOCAB // 4},{config.width}]") == times
        assert called["all_gather", (VOCAB // 4, config.width)] == times
    assert called["reduce_scatter", (VOCAB // 4, STUDENT.width // 2)] == times
    assert not any(shape.startswith((f"[{VOCAB},", f"[{VOCAB // 2},")) for shape in gathered)


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """Twice the vocabulary, or half again as many tokens: less than half a float a token and vocabulary entry."""

    def temporary(**settings: Any) -> int:
        return step(**settings).compiled.memory_analysis().temp_size_in_bytes

    base = temporary(layout="dp2_tp4")
    tokens, vocab = ROWS * LENGTH // 2, VOCAB // 4
    wide = temporary(student=replace(STUDENT, vocab_size=2 * VOCAB), teacher=replace(TEACHER, vocab_size=2 * VOCAB))
    long = temporary(rows=ROWS * 3 // 2)
    a_row, a_token = (wide - base) / 4 / vocab, (long - base) / 4 / (tokens / 2)
    assert a_row < (LIVE_BUFFERS + 1) * CHUNK + 8 * STUDENT.width < tokens / 2
    assert a_token < vocab / 2


def test_nothing_of_the_teacher_is_accumulated():
    """Over four micro-batches the loop carries gradients of the student's shapes and sums of metrics, no more."""
    traced = step(micro_batches=4).traced.jaxpr.jaxpr
    (loop,) = [e for e in equations(traced) if e.primitive.name == "scan" and e.params["length"] == 4]
    carried = collections.Counter(v.aval.shape for v in loop.outvars)
    state, *_ = step().arguments
    local = collections.Counter(x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(state.params))
    assert carried - collections.Counter({(): carried[()]}) == local


# What a layer sends


def collectives_of(jaxpr: Any, sizes: dict[str, int]) -> collections.Counter[str]:
    """How often each kind is called in a jaxpr, by kind and axis; over an axis of size 1 nothing is sent."""
    kinds = {"psum": "all-reduce", "psum_invariant": "all-reduce", "psum2": "all-reduce", "pmax": "all-reduce"}
    kinds |= {"all_gather": "all-gather", "all_gather_invariant": "all-gather", "reduce_scatter": "reduce-scatter"}
    kinds |= {"all_to_all": "all-to-all", "ppermute": "permute"}
    found: collections.Counter[str] = collections.Counter()
    for equation in equations(jaxpr):
        if kind := kinds.get(equation.primitive.name):
            named = equation.params.get("axes", equation.params.get("axis_name"))
            named = (named,) if isinstance(named, str) else named
            found[f"{kind} {'+'.join(named)}"] += any(sizes[a] > 1 for a in named)
    return +found


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


MATRICES = 7  # q, k, v, o, gate, up, down: each is gathered by itself, for XLA to combine
GATHERED, SCATTERED = {"all-gather data": MATRICES}, {"reduce-scatter data": MATRICES}
TENSOR, SEQUENCE = {"all-reduce model": 2}, {"all-gather model": 2, "reduce-scatter model": 2}
NORMS = {"all-reduce model": 2}  # the gradients of two norms, that each shard applied to its own tokens
LAYERS = {
    "dp2_tp4": (TENSOR, TENSOR),
    "sp2_tp4": (SEQUENCE, SEQUENCE | NORMS),
    "fsdp2_tp4": (TENSOR | GATHERED, TENSOR | SCATTERED),
    "fsdp2_sp4": (SEQUENCE | GATHERED, SEQUENCE | NORMS | SCATTERED),
    "replica2_fsdp2_tp2": (TENSOR | GATHERED, TENSOR | SCATTERED),
    "dp8": ({}, {}),
    "fsdp8": (GATHERED, SCATTERED),
}
"""Layout -> collectives of one layer, forward and backward, as the comments in the layouts' files count them."""


@pytest.mark.parametrize("layout", LAYERS)
def test_a_layer_sends_what_its_layout_says(layout):
    forward, backward = LAYERS[layout]
    sizes = MeshLayout.load(layout).sizes
    scans = [e for e in equations(step(layout=layout).traced.jaxpr.jaxpr) if e.primitive.name == "scan"]
    scans = [e for e in scans if e.params["length"] in (STUDENT.layers, TEACHER.layers)]  # the head has its own
    layers = [(e.params["length"], e.params["reverse"], collectives_of(e.params["jaxpr"].jaxpr, sizes)) for e in scans]
    assert layers == [(5, False, forward), (3, False, forward), (3, True, backward)]  # teacher, student, student


def test_what_is_recomputed_is_sent_again():
    """Under remat a layer's parameters are gathered once more, and the sum after attention, but not the last one."""
    student = replace(STUDENT, remat="full")
    scans = [
        e for e in equations(step(layout="fsdp2_tp4", student=student).traced.jaxpr.jaxpr) if e.primitive.name == "scan"
    ]
    found = collectives_of(scans[-1].params["jaxpr"].jaxpr, MeshLayout.load("fsdp2_tp4").sizes)
    assert found == {"all-reduce model": 2 + 1} | GATHERED | SCATTERED


SENT = {
    # where the vocabulary is cut over data too, shards there look at each other's tokens: both hidden states, the
    # labels and which of them count go around, and the hidden states' gradient comes back
    "dp2_tp4": (None, {"all-gather model": 1}),
    "fsdp2_tp4": (None, {"all-gather model": 1, "all-gather data": 1 + 4, "reduce-scatter data": 1}),
    "dp2_tp4, slopes that do not cancel": (ReverseKL(), {"all-gather model": 1, "all-reduce model": 1}),
}
"""What a chunk sends. The terms whose slopes cancel do without a sum."""


@pytest.mark.parametrize("case", SENT)
def test_the_head_sends_vectors_of_a_chunk_and_never_a_vocabulary(case):
    divergence, sent = SENT[case]
    layout = case.split(",")[0]
    traced = step(layout=layout, **({"divergence": divergence} if divergence else {})).traced.jaxpr.jaxpr
    (loop,) = [e for e in equations(traced) if e.primitive.name == "while"]
    body, sizes = loop.params["body_jaxpr"].jaxpr, MeshLayout.load(layout).sizes
    assert collectives_of(body, sizes) == sent
    rows = VOCAB // SHARDS[layout]
    for equation in equations(body):
        if equation.primitive.name in ("all_gather", "reduce_scatter", "psum", "psum_invariant", "psum2"):
            for v in equation.outvars:
                a_token = v.aval.size // CHUNK
                assert a_token <= max(4 * 16, TEACHER.width) and rows not in v.aval.shape
