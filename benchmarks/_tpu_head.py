"""The head on a mesh of TPUs, compiled ahead of time: this library's beside one that makes full logits.

Both compute ``alpha T^2 KL(teacher || student) + (1 - alpha) CE`` at T = 2 and alpha = 1/2 and the gradients of the
student's hidden states and unembedding, in bfloat16. Ours also computes its agreement metrics, as in a training step.
The naive one is what XLA makes of the formula, given where logits should lie; its logits are bfloat16.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from _report import OURS, Row
from _tpu_compile import LINK, TFLOPS, Figures, chunk_of, measure, optimal_of_loop
from jax import lax

from spmd_distill.collectives import psum, to_varying
from spmd_distill.divergences import ForwardKL
from spmd_distill.head import FusedHead
from spmd_distill.mappers import AbstractMapper
from spmd_distill.objective import Objective
from spmd_distill.sharding import REPLICATED
from spmd_distill.types import Batch, LogitTransform, Unembedded

NAME = "tpu-head"
NAIVE = "naive jax"
ALPHA, TEMPERATURE = 0.5, 2.0
TEMPORARIES_BAR, TOTAL_BAR = 0.30, 0.60
"""GiB a device: temporaries, and temporaries and outputs, at the default sizes."""
COLLECTIVES_BAR = 1
"""Collectives a chunk."""


@dataclass(frozen=True)
class HeadProblem:
    """N tokens, of widths Ds (student) and Dt (teacher), and V rows of each unembedding."""

    tokens: int = 16384
    student: int = 2048
    teacher: int = 4096
    vocab: int = 128256
    length: int = 2048
    """Tokens a row of the batch."""

    @property
    def flops(self) -> int:
        """Of the matmuls: two unembeddings forward, two gradients of the student's."""
        return (6 * self.student + 2 * self.teacher) * self.tokens * self.vocab


@dataclass(frozen=True)
class Heads:
    """The programs to compile, on a mapper's mesh."""

    problem: HeadProblem
    mapper: AbstractMapper
    head: FusedHead

    @property
    def ours(self) -> Any:
        """Traced: the head in a shard body, called and summed as `Distillation.train_body` does."""
        layout = self.mapper.layout
        objective = Objective.mix(ForwardKL(), ALPHA, TEMPERATURE)
        axes = {"batch_axes": layout.batch_axes, "vocab_axes": layout.vocab_axes}
        missing = tuple(a for a in layout.batch_axes if a not in layout.vocab_axes)

        def body(h_s: Any, w_s: Any, h_t: Any, w_t: Any, batch: Batch) -> Any:
            count = psum(jnp.sum(batch.mask, dtype=jnp.int32), layout.batch_axes)
            # As float32 parameters are used: matmuls take them rounded, their gradient comes in float32, which is what
            # the head adds it up in. (The naive one returns bfloat16.)
            w_s = to_varying(w_s.astype(jnp.float32), missing)

            def loss(h_s: Any, w_s: Any) -> Any:
                models = (Unembedded(h, w, LogitTransform(self.problem.vocab)) for h, w in ((h_s, w_s), (h_t, w_t)))
                return objective(self.head, *models, batch, jnp.int32(0), count, agreement=True, **axes)

            (d_hidden, d_unembed), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(h_s, w_s)
            return d_hidden, psum(d_unembed, missing), psum(sums, layout.batch_axes)

        hidden, unembed = self._specs
        specs = (hidden, unembed, hidden, unembed, Batch(*(hidden,) * 5))
        return self._trace(self.mapper.map(body, specs, (hidden, unembed, REPLICATED)))

    @property
    def naive(self) -> Any:
        """Traced: full logits, cut over both axes."""
        cut = self.mapper.shardings(self.mapper.layout.spec(("batch", "vocab")))

        def step(h_s: Any, w_s: Any, h_t: Any, w_t: Any, batch: Batch) -> Any:
            labels, mask = batch.labels.reshape(-1), batch.mask.reshape(-1)

            def loss(h_s: Any, w_s: Any) -> Any:
                both = h_s @ w_s.T, lax.stop_gradient(h_t @ w_t.T)
                z_s, z_t = (lax.with_sharding_constraint(z, cut).astype(jnp.float32) for z in both)
                log_s, log_t = (jax.nn.log_softmax(z / TEMPERATURE) for z in (z_s, z_t))
                kl = jnp.sum(jnp.exp(log_t) * (log_t - log_s), axis=-1)
                here = jnp.arange(self.problem.vocab) == labels[:, None]  # a gather would make the logits whole
                ce = jax.nn.logsumexp(z_s, axis=-1) - jnp.sum(jnp.where(here, z_s, 0), axis=-1)
                token = ALPHA * TEMPERATURE**2 * kl + (1 - ALPHA) * ce
                return jnp.sum(jnp.where(mask, token, 0)) / jnp.maximum(jnp.sum(mask), 1)

            value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(h_s, w_s)
            return *gradients, value

        return self._trace(step)

    @property
    def rows_per_shard(self) -> int:
        """Rows of an unembedding that a device holds."""
        layout = self.mapper.layout
        return self.problem.vocab // math.prod(layout.sizes[a] for a in layout.vocab_axes)

    def trips(self, traced: Any) -> int:
        """Chunks of the head's loop if all tokens are valid."""
        layout = self.mapper.layout
        cut = math.prod(layout.sizes[a] for a in layout.batch_axes if a not in layout.vocab_axes)
        return -(-self.problem.tokens // cut // chunk_of(traced, self.rows_per_shard, self.problem.teacher))

    @property
    def _specs(self) -> tuple[Any, Any]:
        layout = self.mapper.layout
        return layout.spec(("batch", None)), layout.spec(("vocab", None))

    def _trace(self, function: Any) -> Any:
        p, (hidden, unembed) = self.problem, (self.mapper.shardings(spec) for spec in self._specs)
        arrays = [
            jax.ShapeDtypeStruct((rows, width), jnp.bfloat16, sharding=at)
            for width in (p.student, p.teacher)
            for rows, at in ((p.tokens, hidden), (p.vocab, unembed))
        ]
        ints, bools = (
            jax.ShapeDtypeStruct((p.tokens // p.length, p.length), t, sharding=hidden) for t in (jnp.int32, jnp.bool_)
        )
        batch = Batch(ints, ints, bools, ints, ints)
        return jax.jit(function, out_shardings=(hidden, unembed, None)).trace(*arrays, batch)


def rows(heads: Heads, setting: dict[str, Any]) -> Iterator[Row]:
    """Measure both; bars that are absolute hold for the default sizes only.

    Where the vocabulary is spread over the data axis too, logits have no place on the mesh: ours is measured alone.
    """
    p, layout = heads.problem, heads.mapper.layout
    naive = set(layout.vocab_axes).isdisjoint(layout.batch_axes)
    setting = setting | {"N": p.tokens, "Ds": p.student, "Dt": p.teacher, "V": p.vocab}
    ideal = p.flops / layout.device_count / TFLOPS * 1e3
    default = p == HeadProblem()
    theirs: dict[str, float] = {}
    if naive:
        found = measure(heads.naive)
        theirs = _values(found, found.optimal)
        yield from (Row(NAME, NAIVE, setting, metric, value, _unit(metric)) for metric, value in theirs.items())
    traced = heads.ours
    trips = heads.trips(traced)
    found = measure(traced, trips)
    values = _values(found, optimal_of_loop(lambda: heads.ours, found, trips))
    bars = {"temporaries": TEMPORARIES_BAR, "temporaries and outputs": TOTAL_BAR} if default else {}
    bars |= {metric: theirs[metric] for metric in ("optimal", "cycles") if metric in theirs}
    chunk = {"chunk": chunk_of(traced, heads.rows_per_shard, p.teacher)}
    for metric, value in values.items():
        row = Row(NAME, OURS, setting | chunk, metric, value, _unit(metric))
        yield row if metric not in bars else dataclasses.replace(row, bar=bars[metric], holds=value <= bars[metric])
    # Spread over the data too, tokens themselves must travel: their hidden states, and the gradient of these.
    bar = COLLECTIVES_BAR + (0 if naive else 3)
    yield Row.at_most(NAME, OURS, setting | chunk, "collectives a chunk", found.per_trip, "", bar)
    yield Row(NAME, "matmuls alone", setting, "MXU ideal", ideal, "ms")


def _values(found: Figures, optimal: float) -> dict[str, float]:
    return {
        "temporaries": found.temp,
        "temporaries and outputs": found.temp + found.output,
        "optimal": optimal * 1e3,
        "cycles": found.cycles * 1e3,
        "on the wire": found.wire,
        "on the wire, one link": found.program.total.wire_bytes / LINK * 1e3,
    }


def _unit(metric: str) -> str:
    return "ms" if metric in ("optimal", "cycles", "on the wire, one link") else "GiB"
