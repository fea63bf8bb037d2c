"""Settings of the two models, of the head between them, and of number types."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from spmd_distill.errors import UserError

Order = Literal["uniform", "importance", "one-by-one"]
"""Which layers of a model are kept."""


@dataclass(frozen=True)
class TeacherConfig:
    """The model to learn from."""

    path: str = "demo"
    """A GGUF file, a Hugging Face folder, or ``demo``: SmolLM2-135M-Instruct, fetched once."""
    attention: Literal["blockwise", "xla", "cudnn"] = "blockwise"
    """What computes attention: blocks of queries in float32 or wider; `jax.nn.dot_product_attention` as XLA compiles
    it; the same by cuDNN's flash attention (NVIDIA GPUs, in bfloat16)."""


@dataclass(frozen=True)
class StudentConfig:
    """The model to train, and what it starts from."""

    init: str = "teacher"
    """``teacher``: some of the teacher's own layers. ``random``: random parameters, as many layers. Else the path of a
    Hugging Face folder or GGUF file: a model of any size and family here, such as ``spmd-distill prune`` writes; its
    tokenizer must be the teacher's, or one that knows fewer of the same tokens."""
    layers: tuple[int, ...] | None = None
    """The layers to take, from 0, in order; null takes ``depth`` of them."""
    depth: int | None = None
    """Number of layers where ``layers`` is null. Null takes all where another size below is given or ``init`` is a
    path, and 11 of the teacher's otherwise."""
    order: Order = "uniform"
    """Which ``depth`` layers: spread evenly; those whose removal costs most, each alone; the same, measured anew after
    every removal."""
    mlp: int | None = None
    """Neurons of every MLP to keep. This and the sizes below keep what matters most on a calibration text; null keeps
    all. With any of them, with an ``order`` that measures, or with ``layers`` or ``depth`` of a path, the run begins by
    pruning (as ``spmd-distill prune`` does) and keeps what it starts from in its folder, as ``start/``."""
    heads: int | None = None
    """Query heads to keep: as many of each key/value head, ``kv_heads`` where that is given, else in whole groups."""
    kv_heads: int | None = None
    """Key/value heads to keep, with all query heads that share them unless ``heads`` says how many."""
    width: int | None = None
    """Channels of the hidden state to keep."""
    vocab_from: tuple[str, ...] = ()
    """Text files, or folders of them, whose tokens are kept, with special tokens and single bytes; empty keeps all. The
    teacher is then asked about these tokens only."""
    calibration_rows: int = 8
    """Rows of training text that importance is measured on."""
    dropout: float = 0.0
    """Part of the activations that training sets to 0, after attention and MLP; the same on every layout, in
    any number of micro-batches."""
    attention: Literal["blockwise", "xla", "cudnn"] = "blockwise"
    """As the teacher's."""
    remat: Literal["none", "full", "sums", "dots"] = "dots"
    """What a layer's forward pass keeps for its backward pass: everything; its input alone (``full``); with it what
    attention returned and what came from other shards, so that no activation is sent twice (``sums``); with these the
    results of its matmuls. Under FSDP, ``none`` keeps every layer's gathered parameters too."""

    @property
    def pruned(self) -> bool:
        """Whether parts of a model have to be chosen before the run, or its sizes cut."""
        sizes = (self.mlp, self.heads, self.kv_heads, self.width)
        cut = any(size is not None for size in sizes) or bool(self.vocab_from) or self.order != "uniform"
        return cut or (self.init not in ("teacher", "random") and (self.layers or self.depth) is not None)

    def check(self) -> None:
        """Raise `UserError` for what contradicts itself."""
        for name in ("depth", "mlp", "heads", "kv_heads", "width", "calibration_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"Run file: student.{name} is {value}; it must be at least 1.")
        if self.layers is not None and self.order != "uniform":
            raise UserError(f"Run file: student.layers are listed: student.order {self.order} has nothing to choose.")
        if self.init == "random" and (self.vocab_from or self.order != "uniform"):
            name = "vocab_from" if self.vocab_from else "order"
            raise UserError(
                f"Run file: student.{name} needs a model to choose from, but student.init is random. Leave it out, or "
                f"start from the teacher."
            )
        if self.order != "uniform" and self.depth is None:
            raise UserError(f"Run file: student.order is {self.order}; expected student.depth beside it.")


@dataclass(frozen=True)
class HeadConfig:
    """How hidden states become losses."""

    kind: Literal["fused", "reference"] = "fused"
    """In chunks, without an array of tokens by vocabulary; or with all logits, for checking."""
    chunk: int | None = None
    """Tokens a chunk; null chooses from the budget."""
    memory_budget_mib: int | None = None
    """MiB that one chunk's logits may take on a device; null balances them with the gradient of the unembedding."""
    logits_dtype: Literal["float32", "bfloat16"] = "float32"
    """What a chunk's logits are held in (float32 is float64 where the computation is). bfloat16 halves their memory and
    rounds them to 8 bits."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Types. Softmax statistics and divergences are float32 or wider in any case; see ``optimizer.state`` too."""

    compute: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """What matmuls and activations are computed in. float16 takes a ``loss_scale``."""
    teacher: Literal["float32", "bfloat16", "float64"] = "float32"
    """What the teacher's parameters are held in."""
    student: Literal["float32", "bfloat16", "float64"] = "float32"
    """What the student's parameters are held in."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """What gradients are added up in, over micro-batches and over shards, and handed to the optimizer in. float32 is
    float64 where the parameters are."""
    loss_scale: float | str | None = None
    """The loss is multiplied by this before gradients are taken, and these are divided by it before anything looks at
    them: a number, a fraction such as ``1/128``, or ``dynamic``, which starts at 32768, doubles after
    ``loss_scale_window`` good steps and halves after one whose gradients overflow; that step changes nothing."""
    loss_scale_window: int = 1000
    """Good steps in a row after which a dynamic loss scale doubles."""

    @property
    def scale(self) -> float | None:
        """The loss scale: a number, None for none or a dynamic one."""
        if self.loss_scale is None or self.loss_scale == "dynamic":
            return None
        try:
            found = float(Fraction(str(self.loss_scale)))
        except (ValueError, ZeroDivisionError, OverflowError):
            found = 0.0
        if found <= 0:
            raise UserError(
                f"Run file: precision.loss_scale is {self.loss_scale!r}; expected a number above 0, a fraction such as "
                f"1/128, dynamic, or null."
            )
        return found

    def check(self) -> None:
        """Raise `UserError` for what is out of its range."""
        if self.scale is None and self.loss_scale is None and self.compute == "float16":
            raise UserError(
                "Run file: precision.compute is float16, in which small gradients are 0; expected a "
                "precision.loss_scale beside it. Set it to dynamic, or compute in bfloat16."
            )
        if self.loss_scale_window < 1:
            raise UserError(
                f"Run file: precision.loss_scale_window is {self.loss_scale_window}; it must be at least 1."
            )
