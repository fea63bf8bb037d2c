"""The training step that `step.py` measures: its sizes, and the random batches every library gets.

It is imported by workers in other environments, so this module needs nothing but numpy.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder of the Llama family, its vocabulary aside."""

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int = 64


TEACHER = Sizes(layers=8, width=512, mlp=1536, heads=8, kv_heads=4)
STUDENT = Sizes(layers=4, width=256, mlp=768, heads=4, kv_heads=4)


@dataclass(frozen=True)
class Workload:
    """Tied embeddings, float32, AdamW; ``alpha T^2 KL(teacher || student) + (1 - alpha) CE`` on a mesh of two axes."""

    vocab: int = 49152
    batch: int = 8
    length: int = 128
    temperature: float = 2.0
    alpha: float = 0.5
    learning_rate: float = 1e-4
    teacher: Sizes = field(default=TEACHER)
    student: Sizes = field(default=STUDENT)
    mesh: tuple[int, int] = (2, 4)
    """Sizes of the data axis (where a library shards parameters too, if asked) and of the tensor-parallel axis."""

    def batches(self, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless ``(tokens, mask)`` of shape [batch, length]; odd rows end in a quarter to a half of padding, id 0."""
        draw = np.random.default_rng(seed)
        while True:
            mask = np.ones((self.batch, self.length), bool)
            for row in mask[1::2]:
                row[self.length - draw.integers(self.length // 4, self.length // 2 + 1) :] = False
            yield draw.integers(1, self.vocab, mask.shape, dtype=np.int32) * mask, mask
