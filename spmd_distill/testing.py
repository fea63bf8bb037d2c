"""Properties that a divergence must have, for whoever writes one: ``check_divergence(MyDivergence())`` in a test."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_distill.collectives import psum, to_varying
from spmd_distill.divergences import (
    AbstractDivergence,
    AbstractRowwise,
    AbstractSeparable,
    at,
    integrand_and_slope,
    scheduled,
)
from spmd_distill.errors import UserError
from spmd_distill.head import FULL, FusedHead, ReferenceHead, Support, Term, TopK
from spmd_distill.head.base import LOWEST
from spmd_distill.mappers import make_mapper
from spmd_distill.sharding import MeshLayout
from spmd_distill.types import LogitTransform, Unembedded

TEMPERATURES = (0.05, 1.0, 20.0)


def check_divergence(
    divergence: AbstractDivergence, *, tokens: int = 16, vocab: int = 29, seed: int = 0, heads: bool = True
) -> None:
    """Raise `AssertionError` with the property, the case and the figures where a divergence breaks the contract.

    Looked at are ``tokens`` random rows of ``vocab`` entries, in float32 and float64, whatever JAX is set to: type and
    shape; finite at logits of 1e4, at temperatures from 0.05 to 20 and where a token is impossible; never below 0, and
    0 at equality; the derivative against finite differences; that a separable one is elementwise, and keeps what its
    class says (`AbstractSeparable.coarsens`, `AbstractSeparable.slopes_cancel`). With ``heads``, also that both heads
    agree on value and gradient, on one device and cut over 2 x 4 (simulated on one), and on all of the vocabulary as
    the k likeliest tokens; that takes some seconds of compiling. Schedules are taken at step 0.
    """
    divergence = at(divergence, {name: float(f(0)) for name, f in scheduled(divergence).items()})
    if not isinstance(divergence, AbstractSeparable | AbstractRowwise):
        raise UserError(
            f"{type(divergence).__name__} is neither an AbstractSeparable nor an AbstractRowwise: only these two are "
            f"described by a formula that can be checked."
        )
    with jax.enable_x64(True):
        check = _Check(divergence, tokens, vocab, seed)
        if isinstance(divergence, AbstractSeparable):
            check.separable(divergence)
        else:
            check.rowwise(divergence)
        if heads:
            check.heads()


class _Check:
    def __init__(self, divergence: AbstractDivergence, tokens: int, vocab: int, seed: int):
        self.divergence, self.name = divergence, type(divergence).__name__
        self.tokens, self.vocab, self.random = tokens, vocab, np.random.default_rng(seed)

    def require(self, ok: Any, what: str) -> None:
        if not bool(ok):
            raise AssertionError(f"{self.name}: {what}")

    def nowhere(self, wrong: jax.Array, x: jax.Array, what: str) -> None:
        """Name the first entry that is wrong."""
        for place in np.argwhere(np.asarray(wrong))[:1]:
            self.require(False, f"{what}: {float(x[tuple(place)]):.4g} at {place.tolist()}")

    def close(self, found: Any, wanted: Any, bar: float, what: str) -> None:
        found, wanted = np.asarray(found), np.asarray(wanted)
        error = np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max())
        self.require(error <= bar, f"{what}: off by {error:.3g} (relative to the largest), allowed are {bar:.1g}")

    def logits(self, scale: float) -> tuple[np.ndarray, np.ndarray]:
        z = self.random.normal(size=(2, self.tokens, self.vocab))
        return scale * z[0] / np.abs(z).max(), scale * z[1] / np.abs(z).max()

    def cases(self) -> Iterator[tuple[str, bool, np.ndarray, np.ndarray]]:
        """(description, whether extreme, teacher's and student's logits), divided by a temperature."""
        for scale in (5.0, 1e4):
            for temperature in TEMPERATURES:
                case = f"logits up to {scale:g} at temperature {temperature:g}"
                t, s = (z / temperature for z in self.logits(scale))
                yield case, scale > 5, t, s
        forbidden = np.arange(self.vocab) % 5 == 2
        t, s = self.logits(5.0)
        for who in ("teacher", "student", "both"):
            low_t, low_s = (np.where(forbidden, LOWEST, z) for z in (t, s))
            yield (
                f"tokens impossible for {who}",
                True,
                t if who == "student" else low_t,
                s if who == "teacher" else low_s,
            )

    def values(self, of: Callable[..., Any], prepare: Callable[..., Any]) -> None:
        """Types, signs, finiteness and zero, of values and derivatives."""
        value_and_slope = jax.jit(of)
        for dtype in (jnp.float32, jnp.float64):
            for case, _, t, s in self.cases():
                t, s = (prepare(jnp.asarray(z, dtype)) for z in (t, s))
                value, slope = value_and_slope(t, s)
                case = f"{case}, {np.dtype(dtype).name}"
                shape = t.shape if slope.shape == value.shape else t.shape[:1]
                self.require(value.shape == shape, f"shape, {case}: {value.shape} from {t.shape}, expected {shape}")
                self.require(value.dtype == dtype, f"type, {case}: {value.dtype} from {np.dtype(dtype)}")
                for what, x in (("value", value), ("derivative", slope)):
                    self.nowhere(~jnp.isfinite(x), x, f"finite {what}, {case}")
                self.nowhere(value < 0, value, f"never below 0, {case}")
                same, _ = value_and_slope(t, t)
                bar = 16 * float(jnp.finfo(dtype).eps)
                self.nowhere(jnp.abs(same) > bar, same, f"0 at equality, {case}")
        t, s = (prepare(jnp.asarray(z)) for z in self.logits(5.0))
        self.require(of(t, s)[0].sum() > 0, "above 0 for different distributions: 0")

    def separable(self, divergence: AbstractSeparable) -> None:
        def of(t: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
            return integrand_and_slope(divergence, t, s)

        def normalised(z: jax.Array) -> jax.Array:
            return jnp.maximum(jax.nn.log_softmax(z), LOWEST)

        self.values(of, normalised)
        integrand = jax.jit(divergence.integrand)
        t, s = (normalised(jnp.asarray(z)) for z in self.logits(5.0))
        value, slope = of(t, s)
        step = 1e-6
        self.close(
            slope, (integrand(t, s + step) - integrand(t, s - step)) / (2 * step), 1e-7, "derivative by differences"
        )
        order = self.random.permutation(self.vocab)
        self.close(integrand(t[:1, order], s[:1, order]), value[:1, order], 1e-12, "elementwise: a permuted row")
        self.close(integrand(t[:, :3], s[:, :3]), value[:, :3], 1e-12, "elementwise: three columns alone")
        if divergence.slopes_cancel:
            self.close(slope.sum(-1), np.zeros(self.tokens), 1e-12, "slopes_cancel: sum of the derivative")
        if divergence.coarsens:
            for buckets in (2, 5, self.vocab // 2):
                member = np.eye(buckets)[self.random.integers(0, buckets, self.vocab)]
                member = member[:, member.any(0)]
                coarse = [jnp.log(jnp.exp(x) @ member) for x in (t, s)]
                more = (integrand(*coarse).sum(-1) - value.sum(-1)).max()
                self.require(
                    more <= 1e-12, f"coarsens: {self.vocab} tokens merged into {buckets} have a value {more:.3g} higher"
                )

    def rowwise(self, divergence: AbstractRowwise) -> None:
        def of(t: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
            value, pull = jax.vjp(lambda s: divergence.per_token(t, s), s)
            return value, pull(jnp.ones_like(value))[0]

        self.values(of, lambda z: jnp.maximum(z, LOWEST))
        t, s = (jnp.asarray(z) for z in self.logits(5.0))
        value, slope = of(t, s)
        order = self.random.permutation(self.tokens)
        self.close(divergence.per_token(t[order], s[order]), value[order], 1e-12, "row by row: permuted rows")
        direction, step = self.random.normal(size=s.shape), 1e-6
        ahead, behind = (divergence.per_token(t, s + sign * step * direction) for sign in (1, -1))
        self.close((slope * direction).sum(-1), (ahead - behind) / (2 * step), 1e-6, "derivative by differences")
        if divergence.own_vocabularies:
            cut = divergence.per_token(t[:, :-3], s)
            self.require(
                cut.shape == value.shape and jnp.isfinite(cut).all(), "own_vocabularies: fewer tokens: not finite"
            )

    def heads(self) -> None:
        whole = TopK(self.vocab)
        wanted = self.by_head(ReferenceHead(), "single", FULL)
        ways: list[tuple[str, Support, str]] = [
            ("single", FULL, "FusedHead on one device"),
            ("dp2_tp4", FULL, "FusedHead over 2 x 4"),
        ]
        if isinstance(self.divergence, AbstractSeparable):
            ways.append(("single", whole, "FusedHead on the vocabulary's V likeliest tokens"))
        for layout, support, where in ways:
            found = self.by_head(FusedHead(chunk=5), layout, support)
            for what, x, y in zip(("value", "gradient of hidden", "gradient of unembed"), found, wanted, strict=True):
                self.close(x, y, 1e-10, f"{where} and ReferenceHead agree, {what}")

    def by_head(self, head: FusedHead | ReferenceHead, layout_name: str, support: Support) -> tuple[Any, ...]:
        """Sum over tokens, some of them masked, and its gradients, with the shards of the layout on one device."""
        layout = MeshLayout.load(layout_name)
        random, rows = np.random.default_rng(0), -(-self.vocab // 8) * 8
        n = -(-self.tokens // 8) * 8
        arrays = [random.normal(size=shape) for shape in ((n, 6), (rows, 6), (n, 4), (rows, 4))]
        labels, mask = np.zeros(n, np.int32), random.random(n) < 0.8
        transform, terms = LogitTransform(self.vocab), (Term(self.divergence, None),)

        def body(hs: Any, ws: Any, ht: Any, wt: Any, labels: Any, mask: Any) -> Any:
            def loss(hs: Any, ws: Any) -> jax.Array:
                student, teacher = Unembedded(hs, ws, transform), Unembedded(ht, wt, transform)
                numbers = jnp.ones(1, hs.dtype), jnp.full(1, 1.7, hs.dtype)
                axes: Any = {"vocab_axes": layout.vocab_axes, "batch_axes": layout.batch_axes}
                return head(
                    student, teacher, labels, mask, terms, *numbers, agreement=False, support=support, **axes
                ).loss

            ws = to_varying(ws, layout.batch_axes)
            value, (dh, dw) = jax.value_and_grad(loss, (0, 1))(hs, ws)
            return psum(value, layout.batch_axes), dh, psum(dw, layout.batch_axes)

        by_token, by_row = layout.spec(("batch", None)), layout.spec(("vocab", None))
        specs = (by_token, by_row, by_token, by_row, layout.spec(("batch",)), layout.spec(("batch",)))
        mapped = make_mapper("vmap", layout).map(body, specs, (layout.spec(()), by_token, by_row))
        return jax.jit(mapped)(*arrays, labels, mask)
