"""From a teacher's name to a folder with a smaller model: what `spmd-distill prune` does."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from spmd_distill.config import Order
from spmd_distill.data import Document, eval_batches
from spmd_distill.distributed import all_or_none, barrier, is_first
from spmd_distill.errors import UserError
from spmd_distill.interop import ModelCard, TextTokenizer, trim_tokenizer, used_tokens
from spmd_distill.loading import Checkpoint, documents, open_checkpoint, tokenise
from spmd_distill.mappers import AbstractMapper, make_mapper
from spmd_distill.models import DecoderConfig, Model
from spmd_distill.pretrained import save_pretrained
from spmd_distill.prune.importance import Importance, activations, agreement, layers_to_keep, measure_removals
from spmd_distill.prune.keep import Keep, check_sizes, cut, evenly, keep_by_importance
from spmd_distill.types import Batch, Params

ORDERS = get_args(Order)
"""How layers are chosen: spread evenly; those whose removal costs most, each alone; the same, measured anew after every
removal."""
Stage = Callable[[str], AbstractContextManager[None]]
"""Shows that something is under way."""
REPORT = "prune.json"
SHOWN = {
    "kl": "KL to the teacher",
    "ce_student": "cross entropy",
    "top1": "top-1 agreement",
    "acceptance": "acceptance",
}


@dataclass(frozen=True)
class Wanted:
    """The sizes of the smaller model; None keeps the teacher's. Raises `UserError` for what contradicts itself."""

    layers: tuple[int, ...] | None = None
    depth: int | None = None
    order: str = "importance"
    mlp: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    width: int | None = None
    vocab_from: tuple[str, ...] = ()
    """Text files, or folders of them: only tokens that they use are kept."""
    calibration_rows: int = 8
    """Rows of training text that importance is measured on."""
    heldout_rows: int = 16
    length: int = 128

    def __post_init__(self):
        """Check what needs no teacher."""
        if self.order not in ORDERS:
            raise UserError(f"order is {self.order!r}; expected one of {', '.join(ORDERS)}.")
        if self.layers is not None and self.depth is not None:
            raise UserError("layers and depth were both given; expected one of them.")
        for name in ("depth", "calibration_rows", "heldout_rows", "length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1.")

    def sizes(self, config: DecoderConfig) -> dict[str, Any]:
        """Sizes within a layer for `keep_by_importance`. ``heads`` alone is so many in whole groups.

        Raises `UserError` for what a model of ``config`` does not have, also for its layers.
        """
        Keep(layers=self.layers).sizes(config)
        if self.depth is not None and self.depth > config.layers:
            raise UserError(f"depth is {self.depth}; the teacher has {config.layers} layers.")
        shared, heads, kv_heads = config.heads // config.kv_heads, self.heads, self.kv_heads
        if heads is not None and kv_heads is None:
            if heads % shared:
                raise UserError(
                    f"heads is {heads}, and {shared} query heads share a key/value head; expected a multiple of "
                    f"{shared}, or kv_heads too."
                )
            kv_heads = heads // shared
        found = {"mlp": self.mlp, "kv_heads": kv_heads, "width": self.width, "heads": heads}
        check_sizes(config, **found)
        return found

    def first(self, config: DecoderConfig) -> Keep:
        """The first of everything, where only sizes matter; tokens are not looked at."""
        found = self.sizes(config)
        layers = self.layers or evenly(config.layers, self.depth or config.layers)
        each = {name: np.zeros((config.layers, getattr(config, name))) for name in ("mlp", "heads", "kv_heads")}
        anything = Importance(each["mlp"], each["heads"], each["kv_heads"], np.zeros(config.width))
        return keep_by_importance(config, anything, layers, **found)

    @property
    def cuts(self) -> bool:
        """Whether anything is to be cut."""
        return self.ranks or self.layers is not None or self.depth is not None or bool(self.vocab_from)

    @property
    def ranks(self) -> bool:
        """Whether parts of layers have to be ranked."""
        return any(x is not None for x in (self.mlp, self.heads, self.kv_heads, self.width))


def prune(
    teacher: str,
    out: str | Path,
    wanted: Wanted,
    text: Sequence[str] = ("demo",),
    mesh: str | AbstractMapper = "single",
    console: Console | None = None,
    *,
    heldout: Sequence[str] = (),
    param_dtype: str = "float32",
    stage: Stage | None = None,
) -> dict[str, Any]:
    """Write a smaller model made of parts of ``teacher`` to ``out``; return what ``prune.json`` says.

    Importance is measured on the training part of ``text``, and what the cut costs, before any training, on
    ``heldout``, or without it on a tenth of ``text`` set aside. Where tokens are cut, the teacher is cut to the same
    ones first. The folder is a Hugging Face folder that transformers loads and that a run may start its student from
    (``student.init``). Raises `UserError` for whatever the user can mend; then nothing is written.

    Progress and results go to ``console`` (None: stderr); with ``stage``, it shows what is under way, and nothing else
    is shown.
    """
    console = Console(quiet=True) if stage is not None else console or Console(stderr=True)
    shown: Stage = stage or partial(_stage, console)
    if not wanted.cuts:
        raise UserError("Nothing to cut: expected depth, layers, mlp, heads, kv_heads, width or vocab_from.")
    with _new_folder(Path(out)):
        with shown("opening the teacher"):
            checkpoint = open_checkpoint(teacher, param_dtype, console.print)
            config = checkpoint.model.config
            mapper = make_mapper("shard_map", mesh) if isinstance(mesh, str) else mesh
            wanted.sizes(config)
        with shown("tokenising the text"):
            training, aside = documents(list(text), list(heldout), console.print)
            tokenizer, tokens = _vocabulary(checkpoint.tokenizer, wanted)
            rows = [
                calibration_batches(part, tokenizer or checkpoint.tokenizer, wanted.length, count, mapper, what)
                for part, count, what in (
                    (training, wanted.calibration_rows, "training"),
                    (aside, wanted.heldout_rows, "held-out"),
                )
            ]
        with shown("placing the teacher's weights"):
            params, model = checkpoint.load(mapper), checkpoint.model
            if tokens is not None:
                params, model = cut(params, model, Keep(tokens=tokens), mapper)
        keep = _choose(model, params, mapper, rows[0], wanted, shown, None if stage else console)
        with shown("cutting"):
            small, student = cut(params, model, keep, mapper)
        with shown("measuring what it costs"):
            before = agreement(model, params, model, params, mapper, rows[1])
            after = agreement(student, small, model, params, mapper, rows[1])
        with shown("writing"):
            report = _report(checkpoint, student, keep, before, after, wanted)
            _save(out, checkpoint, student, small, tokenizer, report)
    _show(report, console)
    return report


@contextmanager
def _stage(console: Console, what: str) -> Iterator[None]:
    """Show that something is under way: a spinner on a terminal, a line elsewhere."""
    if not console.is_terminal:
        console.print(f"{what} ...")
        yield
    else:
        with console.status(what):
            yield


@contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """Make the folder now, so that nothing is measured in vain; take it away again where nothing came of it."""
    above = [folder for folder in (out, *out.parents) if not folder.exists()] if is_first() else []
    all_or_none(partial(_make_folder, out), first_only=True)
    try:
        yield
    except BaseException as error:
        for folder in above:  # from the inside out; one that holds anything stays
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError) and not isinstance(error, UserError):
            raise UserError(f"{out}: cannot be written ({error.strerror or error}); nothing was kept.") from error
        raise


def _make_folder(out: Path) -> None:
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out}: is there already; expected a new or empty folder. Give another path.")
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); expected a new folder. Give another.") from error


def _vocabulary(tokenizer: TextTokenizer, wanted: Wanted) -> tuple[TextTokenizer | None, np.ndarray | None]:
    if not wanted.vocab_from:
        return None, None
    corpus, aside = documents(list(wanted.vocab_from), [])
    return trim_tokenizer(tokenizer, used_tokens(tokenizer, [d.text for d in (*corpus, *aside)]).tolist())


def calibration_batches(
    texts: Sequence[Document], tokenizer: TextTokenizer, length: int, count: int, mapper: AbstractMapper, what: str
) -> list[Batch]:
    """About ``count`` rows spread over the documents, in batches that the layout can cut."""
    rows = tokenise(texts, tokenizer, length, tokenizer.vocab_size, 2 * count * length, what)
    shards = mapper.layout.batch_shards
    return eval_batches(rows.spread(count), max(4 // shards, 1) * shards)


def _choose(
    model: Model, params: Params, mapper: AbstractMapper, rows: Sequence[Batch], wanted: Wanted, shown: Stage,
    bar: Console | None,
) -> Keep:  # fmt: skip
    depth, layers = model.config.layers, wanted.layers
    if wanted.depth is not None and wanted.order == "uniform":
        layers = evenly(depth, wanted.depth)
    elif wanted.depth is not None and wanted.depth < depth:
        measured = measure_removals(model, params, mapper, rows)

        def costs(layers: Sequence[int], removed: Sequence[int]) -> np.ndarray:
            what = f"measuring the model without each of {len(layers)} layers"
            if bar is not None and bar.is_terminal:
                return measured(layers, removed, lambda layers: track(layers, what, console=bar, transient=True))
            with shown(what):
                return measured(layers, removed)

        layers = layers_to_keep(costs, depth, wanted.depth, one_by_one=wanted.order == "one-by-one")
    importance = None
    if wanted.ranks:
        with shown("ranking neurons, heads and channels"):
            importance = activations(model, params, mapper, rows)
    return keep_by_importance(model.config, importance, layers, **wanted.sizes(model.config))


def _report(
    checkpoint: Checkpoint, student: Model, keep: Keep, before: dict[str, float], after: dict[str, float],
    wanted: Wanted,
) -> dict[str, Any]:  # fmt: skip
    teacher = checkpoint.model.config
    names = {"layers": "layers", "mlp": "neurons of an MLP", "heads": "query heads", "kv_heads": "key/value heads",
             "width": "width", "tokens": "tokens"}  # fmt: skip
    return {
        "teacher": str(checkpoint.source),
        "order": wanted.order if wanted.layers is None else "as listed",
        "layers": list(range(teacher.layers)) if keep.layers is None else list(keep.layers),
        "kept": {said: [getattr(teacher, key), getattr(student.config, key)] for key, said in names.items()}
        | {"parameters": [checkpoint.model.parameter_count, student.parameter_count]},
        "heldout": {said: [before[key], after[key]] for key, said in SHOWN.items()},
    }


def _save(
    out: str | Path, checkpoint: Checkpoint, student: Any, params: Params, tokenizer: TextTokenizer | None,
    report: dict[str, Any],
) -> None:  # fmt: skip
    card = ModelCard(
        teacher={"model": checkpoint.source.repository or checkpoint.source.path.name},
        student={"layers of the teacher": report["layers"]}
        | {name: f"{new:,} of {old:,}" for name, (old, new) in report["kept"].items()},
        results={
            name: {"teacher": f"{a:.4f}", "before any training": f"{b:.4f}"}
            for name, (a, b) in report["heldout"].items()
        },
        tags=("pruned", "spmd_distill"),
    )
    save_pretrained(out, student, params, like=checkpoint, tokenizer=tokenizer, card=card, overwrite=True)
    if is_first():
        (Path(out) / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    barrier("pruned")


def read_report(folder: Path) -> dict[str, Any] | None:
    """What ``prune.json`` in a model's folder says; None where there is none, or none that can be read."""
    try:
        found = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"kept", "layers"} <= found.keys() else None


def describe(report: dict[str, Any]) -> str:
    """What was kept, in a few words."""
    sizes = [f"{new:,} of {old:,} {name}" for name, (old, new) in report["kept"].items() if old != new]
    return f"{', '.join(sizes)}; layers {', '.join(map(str, report['layers']))}"


def _show(report: dict[str, Any], console: Console) -> None:
    table = Table("", "teacher", "kept", title="What was kept")
    for name, (old, new) in report["kept"].items():
        table.add_row(name, f"{old:,}", f"{new:,}")
    console.print(table)
    table = Table("", "teacher", "student", title="What it cost, untrained")
    for name, (old, new) in report["heldout"].items():
        table.add_row(name, f"{old:.4f}", f"{new:.4f}")
    console.print(table)
    console.print(f"layers: {', '.join(map(str, report['layers']))}")
