"""The run file: one tree of frozen dataclasses, the same from YAML, from flags and from Python.

This module does not import jax, so that the command can read a run file before jax starts.
"""

import dataclasses
import difflib
import re
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from spmd_distill.errors import UserError
from spmd_distill.objective_config import ObjectiveConfig, check_objective

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
    chunk: int | None = None
    """Tokens a chunk; null chooses from the budget."""
    memory_budget_mib: int | None = None
    """What one chunk's logits may take on a device; null balances them with the gradient of the unembedding."""
    logits_dtype: Literal["float32", "bfloat16"] = "float32"
    """What a chunk's logits are held in (float32 is float64 where the computation is). bfloat16 halves their memory and
    rounds them to 8 bits."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay, behind a clip of the global gradient norm."""

    learning_rate: float = 1e-3
    warmup_steps: int = 10
    final_fraction: float = 0.1
    """The learning rate ends at this part of its peak."""
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0


@dataclass(frozen=True)
class PrecisionConfig:
    """Types. Softmax statistics, divergences and gradient sums are float32 or wider in any case."""

    compute: Literal["float32", "bfloat16", "float64"] = "float32"
    teacher: Literal["float32", "bfloat16", "float64"] = "float32"
    """What the teacher's parameters are held in."""
    student: Literal["float32", "bfloat16", "float64"] = "float32"
    """What the student's parameters and the optimizer's moments are held in."""


@dataclass(frozen=True)
class DataConfig:
    """Text, cut into rows of ``length`` tokens."""

    train: tuple[str, ...] = ("demo",)
    """Text files, folders of them, or ``demo``: Shakespeare's plays and Python's own documentation."""
    heldout: tuple[str, ...] = ()
    """The same for evaluation; empty splits off a tenth of the training documents by name."""
    length: int = 128
    rows: int = 4
    """Rows of a micro-batch, over all devices."""
    micro_batches: int = 1
    """Micro-batches an optimizer step; their gradients are summed exactly."""
    max_train_tokens: int | None = None
    """Tokenise no more than about this many tokens of training text."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out text, before, every so many steps, and after."""

    every: int = 100
    rows: int = 32
    """Held-out rows that are scored each time."""
    prompts: tuple[str, ...] = (
        "The capital of France is",
        "To be, or not to be, that is",
        "In Python, a list comprehension is",
    )
    """Continued by teacher and student at the end."""
    new_tokens: int = 24


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of student, optimizer and data position."""

    every: int = 100
    keep: int = 3


@dataclass(frozen=True)
class RunConfig:
    """Everything about a run."""

    run: str = "runs/distil"
    """The folder the run writes; it must not hold another run."""
    steps: int = 100
    seed: int = 0
    mesh: str = "auto"
    """A built-in layout, the path of one, or ``auto``: dp2_tp4 on a CPU or 8 devices, else what the devices allow."""
    mapper: Literal["shard_map", "vmap", "pmap"] = "shard_map"
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self):
        """Check what no type can say."""
        for name in (
            "steps", "data.length", "data.rows", "data.micro_batches", "eval.rows", "checkpoint.keep",
            "checkpoint.every", "eval.every", "eval.new_tokens",
        ):  # fmt: skip
            value: Any = self
            for part in name.split("."):
                value = getattr(value, part)
            if value < 1:
                raise UserError(f"Run file: {name} is {value}; it must be at least 1.")
        self.student.check()
        try:
            check_objective(self.objective)
        except UserError as error:
            raise UserError(f"Run file: {error}") from None
        for name in ("chunk", "memory_budget_mib"):
            value = getattr(self.head, name)
            if value is not None and value < 1:
                raise UserError(f"Run file: head.{name} is {value}; it must be at least 1, or null.")


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain dicts and lists, ready for YAML."""
    as_lists = lambda x: [as_lists(y) for y in x] if isinstance(x, (list, tuple)) else x  # noqa: E731
    return dataclasses.asdict(config, dict_factory=lambda items: {k: as_lists(v) for k, v in items})


def parse_config(arguments: Sequence[str] = (), path: str | Path | None = None) -> RunConfig:
    """Read a run file and flags (``--optimizer.learning_rate 1e-4``) on top of it; what neither sets has its default.

    Raises `UserError` naming the setting for an unknown one (and the nearest known), a value of a wrong type, a file
    that is missing or not YAML.
    """
    where = "Run settings" if path is None else f"Run file {path}"
    parser = ArgumentParser(exit_on_error=False, prog="spmd-distill", allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(RunConfig, fail_untyped=True)
    given = [] if path is None else ["--config", str(path)]
    try:
        found = vars(parser.instantiate(parser.parse_args([*given, *arguments])))
    except UserError:
        raise
    except (ArgumentError, TypeError, ValueError) as error:
        raise UserError(f"{where}: {_readable(str(error))}") from error
    return RunConfig(**{f.name: found[f.name] for f in dataclasses.fields(RunConfig)})


def setting_names(cls: Any = RunConfig, prefix: str = "") -> list[str]:
    """Every setting by its dotted name."""
    names = []
    for f in dataclasses.fields(cls):
        inner = f.default_factory if dataclasses.is_dataclass(f.default_factory) else None
        names += setting_names(inner, f"{prefix}{f.name}.") if inner else [prefix + f.name]
    return names


def _readable(message: str) -> str:
    """jsonargparse's sentence, with the nearest known name of a setting that does not exist."""
    message = message.replace("Parser key ", "")
    group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    alone = re.search(r"Option '([\w.]+)' is not accepted", message) or re.search(r"arguments: --([\w.]+)", message)
    name = f"{group[1]}.{group[2]}" if group else alone[1] if alone else None
    if name is None:
        return message
    near = difflib.get_close_matches(name, setting_names(), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else f" Known are {', '.join(setting_names())}."
    return f"unknown setting {name!r}.{hint}"
