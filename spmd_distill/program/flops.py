"""How many floating-point operations a step asks for: counted in the program, and by formula.

Counted are the matmuls (a multiplication and an addition are two operations), as everywhere where a model FLOPs
utilisation is given; what is done element by element is left out. The count walks the traced program: the body of a
scan counts as often as it runs, the body of a shard on all shards. XLA's own figure (`Compiled.cost`) counts the body
of every loop once, which for a model with scanned layers is off by about the number of layers.

`step_flops` counts MODEL operations, those that no implementation could leave out: of the textbook program of the same
models, on one device, with whole attention matrices, full logits of all tokens, and nothing computed twice. Hence
recomputation (remat) makes a step slower without making its utilisation look better. The matmuls of losses inside the
network (projections, relations, attention maps) count as their program makes them: what it computes again in the
backward pass counts again. `analytic_flops` is the same by formula, for decoders and without losses inside the network,
with B rows of L tokens, N = B L::

    forward(model) = N (2 P + 4 L H C n)     P = n (2 D H C + 2 D K C + 3 D F) + V D
    step           = 3 forward(student) + forward(teacher)

n layers, width D, H query and K key/value heads of C channels, F neurons, V stored rows of the vocabulary: 6 P
operations a token for the student (2 forward, 4 backward), 2 P for the teacher, and ``4 L H C`` a layer for scores and
weighted sums, without halving them for the causal mask, as in the PaLM report (https://arxiv.org/abs/2204.02311,
appendix B).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from spmd_distill.head import ReferenceHead
from spmd_distill.mappers import make_mapper
from spmd_distill.models import decoder
from spmd_distill.models.config import DecoderConfig
from spmd_distill.sharding import REPLICATED
from spmd_distill.step import Distillation
from spmd_distill.teachers import OnlineTeacher
from spmd_distill.types import Batch


def count_flops(function: Callable[..., Any], *args: Any) -> float:
    """Operations of the matmuls and convolutions of ``function(*args)``, over all devices it is cut over.

    ``args`` are arrays or `jax.ShapeDtypeStruct`s; nothing is computed. A loop whose number of trips is not known
    counts once, of the branches of a condition the dearest counts.
    """
    return _of(jax.make_jaxpr(function)(*args).jaxpr)


def step_flops(run: Distillation, batch: Batch) -> float:
    """Model operations of one training step on a batch like ``batch [A, B, L]``, of all devices together.

    All positions of the batch count, those that are masked too. See this module's docstring.
    """
    mapper = make_mapper("vmap", "single")
    length = batch.tokens.shape[-1]
    student, teacher = (_textbook(model, length) for model in (run.student, run.teacher.model))
    plain = replace(run, student=student, teacher=OnlineTeacher(teacher), mapper=mapper, head=ReferenceHead())
    specs = (
        plain.trained.specs(mapper.layout),
        teacher.specs(mapper.layout),
        plain.batch_specs(1),
        REPLICATED,
        REPLICATED,
    )
    body = plain.gradients if run.foreign else mapper.map(plain.train_body, specs, (specs[0], REPLICATED, REPLICATED))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    number = (jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.uint32))
    return count_flops(body, plain.trained.abstract, teacher.abstract, shapes, *number)


def analytic_flops(student: DecoderConfig, teacher: DecoderConfig, rows: int, length: int) -> float:
    """`step_flops` of two decoders by the formula above, for ``rows`` of ``length`` tokens."""
    return 3 * _forward(student, rows, length) + _forward(teacher, rows, length)


def _forward(config: DecoderConfig, rows: int, length: int) -> float:
    heads = config.heads * config.head_dim
    layer = 2 * config.width * (heads + config.kv_heads * config.head_dim) + 3 * config.width * config.mlp
    matrices = config.layers * layer + config.padded_vocab * config.width
    return float(rows * length * (2 * matrices + 4 * length * heads * config.layers))


def _textbook(model: Any, length: int) -> Any:
    """The same decoder without settings that trade operations for memory; any other model as it is."""
    config = getattr(model, "config", None)
    if not isinstance(config, DecoderConfig):
        return model
    return decoder(replace(config, remat="none", attention="blockwise", attention_block=length))


def _of(jaxpr: Any) -> float:
    return sum((_of_equation(equation) for equation in jaxpr.eqns), 0.0)


def _of_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel, features = equation.invars[1].aval.shape, params["dimension_numbers"].rhs_spec[0]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[features]
    if name == "pallas_call":
        estimate = params.get("cost_estimate")
        return float(getattr(estimate, "flops", 0.0))
    inner = [_of(jaxpr) for jaxpr in inside(params)]
    if name == "cond":
        return max(inner, default=0.0)
    times = params["length"] if name == "scan" else 1
    if name == "shard_map":
        axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
        times = math.prod(params["mesh"].shape[axis] for axis in axes)
    return times * sum(inner)


def inside(params: dict[str, Any]) -> Iterator[Any]:
    """The programs that an equation holds: bodies, branches, functions called."""
    for value in params.values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner
