"""The values that travel between the rooms of the library, and the letters their shapes are written in.

Shape letters: ``B`` rows of a (micro-)batch, ``L`` tokens of a row, ``D`` width of the hidden state, ``V`` vocabulary,
``N`` tokens of a flattened batch (``N = B * L``), ``A`` micro-batches of one optimizer step.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

AnyArray = Any
"""A jax or a numpy array: a batch lives on the host before it lives on devices."""

Params = Any
"""A pytree of arrays: the parameters of one model, as nested plain dicts."""


@struct.dataclass
class Batch:
    """Rows of tokens, already shifted: ``labels[b, l]`` is the token that follows ``tokens[b, l]``.

    Leading dimensions are free: ``[B, L]`` for evaluation, ``[A, B, L]`` for an optimizer step of A micro-batches.
    """

    tokens: Int[AnyArray, "*B L"]
    labels: Int[AnyArray, "*B L"]
    mask: Bool[AnyArray, "*B L"]
    """True where the label counts in the loss. A masked position costs no vocabulary matmul."""
    positions: Int[AnyArray, "*B L"]
    """Position of the token inside its own document, for rotary embeddings."""
    segments: Int[AnyArray, "*B L"]
    """Which packed document the token belongs to, from 1; 0 is padding. No attention crosses segments."""


@dataclass(frozen=True)
class LogitTransform:
    """What happens between ``hidden @ unembed.T + bias`` and the logits. Known when the program is compiled."""

    vocab_size: int
    """Rows of the whole unembedding that are real tokens; rows from here on are padding and get no probability."""
    logit_scale: float = 1.0
    """Cohere's and Granite's factor on the logits."""
    softcap: float | None = None
    """Gemma 2's ``cap * tanh(logits / cap)``, applied last."""


@struct.dataclass
class Unembedded:
    """What a model hands to a head instead of logits: ``logits = transform(hidden @ unembed.T + bias)``.

    Inside a shard body ``unembed`` and ``bias`` hold this shard's rows of the vocabulary.

    A model that cannot stop before its logits puts them in the place of hidden states, ``[*N, V]``, with an unembedding
    of width 0: ``logits = transform(hidden + bias)``. Inside a shard body they are the columns of this shard's rows.
    """

    hidden: Float[Array, "*N D"]
    unembed: Float[Array, "V D"]
    transform: LogitTransform = struct.field(pytree_node=False)
    bias: Float[Array, " V"] | None = None

    @property
    def has_logits(self) -> bool:
        """Whether ``hidden`` are logits."""
        return self.unembed.shape[-1] == 0


@struct.dataclass
class Mean:
    """A metric on its way to an average, ``sum / count``. Sums add up over shards, micro-batches and steps."""

    sum: Shaped[Array, "..."]
    count: Shaped[Array, "..."]

    def __add__(self, other: "Mean") -> "Mean":
        """Pool two sets of samples."""
        return Mean(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> jax.Array:
        """The average; 0 where nothing was counted."""
        return jnp.where(self.count > 0, self.sum / jnp.maximum(self.count, 1), 0.0)


Metrics = dict[str, Mean]


@struct.dataclass
class TrainState:
    """Everything an optimizer step changes. The teacher is not here: it is neither trained, donated nor saved."""

    step: Int[Array, ""]
    """Optimizer steps done: the one clock of schedules, evaluation and checkpoints."""
    params: Params
    opt_state: Any
    seed: UInt32[Array, ""]
    """Every random number of step k is drawn from ``fold_in(key(seed), k)``: nothing else has to be saved."""
    ema: Params | None = None
    """The moving average of the trained parameters, where there is one (`UpdateRule.ema`)."""
    loss_scale: Any = None
    """The dynamic loss scale, where there is one (`UpdateRule.loss_scale`)."""
