"""Worker of `head.py`: heads in JAX on one device, this library's and two that make full logits.

``{"memory": name, ...sizes}`` compiles one and answers with its bytes; ``{"time": name, "mask": mask}`` runs one once
and answers with its seconds and the loss; ``{"rounded": dtype}`` runs ours with logits held in that type beside ours as
it is.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _head_problem import ALPHA, TEMPERATURE, Problem, add_flags, from_flags
from _hlo import memory
from _worker import Channel, stopwatch

from spmd_distill.collectives import psum, to_varying
from spmd_distill.divergences import CrossEntropy, ForwardKL
from spmd_distill.head import FusedHead, Term
from spmd_distill.mappers import make_mapper
from spmd_distill.sharding import REPLICATED
from spmd_distill.types import LogitTransform, Unembedded

WEIGHTS = (ALPHA * TEMPERATURE**2, 1 - ALPHA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=256, help="memory of our head's chunks, in MiB")
    add_flags(parser)
    options = parser.parse_args()
    channel, problem = Channel(), from_flags(options)
    heads = {
        "naive": naive,
        "optax": with_optax,
        "ours": functools.partial(ours, FusedHead(memory_budget=options.budget * 2**20)),
    }
    steps = {name: jax.jit(step) for name, step in heads.items()}
    arrays: tuple[Any, ...] = ()
    for request in channel.requests():
        if name := request.pop("memory", None):
            step = steps[name]
            if name == "ours" and (budget := request.pop("budget", None)):
                step = jax.jit(functools.partial(ours, FusedHead(memory_budget=budget * 2**20)))
            request.pop("budget", None)
            channel.say(memory(step.lower(*described(Problem(**request))).compile()))
            continue
        arrays = arrays or jax.device_put(problem.inputs())
        if dtype := request.pop("rounded", None):
            budget = options.budget * 2**20
            rounded = jax.jit(functools.partial(ours, FusedHead(memory_budget=budget, logits_dtype=dtype)))
            everything = jax.device_put(problem.mask("all"))
            channel.say(difference(*(step(*arrays, everything) for step in (rounded, steps["ours"]))))
            continue
        mask = jax.device_put(problem.mask(request["mask"]))
        step = steps[request["time"]]
        jax.block_until_ready((arrays, mask))
        with stopwatch() as found:
            loss, gradients = jax.block_until_ready(step(*arrays, mask))
        channel.say(found | {"loss": float(loss)})
        del gradients


def difference(found: Any, expected: Any) -> dict[str, float]:
    """Of the gradients by hidden states and unembedding, relative, as vectors; and of the loss."""
    errors = [jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in zip(found[1], expected[1], strict=True)]
    return {"gradient": float(max(errors)), "loss": float(abs(found[0] / expected[0] - 1))}


def described(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    n, v = problem.tokens, problem.vocab
    shapes = [((rows, width), "f4") for width in (problem.student, problem.teacher) for rows in (n, v)]
    return [jax.ShapeDtypeStruct(*x) for x in (*shapes, ((n,), "i4"), ((n,), "?"))]


def with_gradients(loss: Any) -> Any:
    """Loss and gradients by the student's hidden states and unembedding."""
    return jax.value_and_grad(loss, argnums=(0, 1))


@with_gradients
def naive(h_s: Any, w_s: Any, h_t: Any, w_t: Any, labels: Any, mask: Any) -> Any:
    """The formula as it is written, on full logits."""
    z_s, z_t = h_s @ w_s.T, h_t @ w_t.T
    log_s, log_t = (jax.nn.log_softmax(z / TEMPERATURE) for z in (z_s, z_t))
    kl = jnp.sum(jnp.exp(log_t) * (log_t - log_s), axis=-1)
    ce = -jnp.take_along_axis(jax.nn.log_softmax(z_s), labels[:, None], axis=-1)[:, 0]
    return mean(WEIGHTS[0] * kl + WEIGHTS[1] * ce, mask)


@with_gradients
def with_optax(h_s: Any, w_s: Any, h_t: Any, w_t: Any, labels: Any, mask: Any) -> Any:
    """The same of optax's losses."""
    z_s, z_t = h_s @ w_s.T, h_t @ w_t.T
    log_s, log_t = (jax.nn.log_softmax(z / TEMPERATURE) for z in (z_s, z_t))
    kl = optax.losses.kl_divergence_with_log_targets(log_s, log_t)
    ce = optax.losses.softmax_cross_entropy_with_integer_labels(z_s, labels)
    return mean(WEIGHTS[0] * kl + WEIGHTS[1] * ce, mask)


def mean(values: Any, mask: Any) -> Any:
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.sum(mask)


def ours(head: FusedHead, *arrays: Any) -> Any:
    """The fused head as the training step calls it, in a shard body on one device."""
    mapper = make_mapper("shard_map", "single")
    layout = mapper.layout
    terms = (Term(ForwardKL(), TEMPERATURE), Term(CrossEntropy()))
    vocab = arrays[1].shape[0]

    def body(h_s: Any, w_s: Any, h_t: Any, w_t: Any, labels: Any, mask: Any) -> Any:
        count = psum(jnp.sum(mask), layout.batch_axes)

        def loss(h_s: Any, w_s: Any) -> Any:
            student, teacher = (Unembedded(h, w, LogitTransform(vocab)) for h, w in ((h_s, w_s), (h_t, w_t)))
            settings = {"agreement": False, "batch_axes": layout.batch_axes}
            weights, temperatures = jnp.array(WEIGHTS) / count, jnp.array([TEMPERATURE, 1.0])
            return head(student, teacher, labels, mask, terms, weights, temperatures, **settings).loss

        w_s = to_varying(w_s, layout.batch_axes)  # its gradient is this shard's own, until it is summed
        value, (d_hidden, d_unembed) = jax.value_and_grad(loss, argnums=(0, 1))(h_s, w_s)
        return psum(value, layout.batch_axes), (d_hidden, psum(d_unembed, layout.batch_axes))

    hidden, unembed, token = layout.spec(("batch", None)), layout.spec(("vocab", None)), layout.spec(("batch",))
    specs = (hidden, unembed, hidden, unembed, token, token)
    return mapper.map(body, specs, (REPLICATED, (hidden, unembed)))(*arrays)


if __name__ == "__main__":
    main()
