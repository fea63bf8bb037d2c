"""Settings of what is trained and evaluated on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spmd_distill.errors import UserError


@dataclass(frozen=True)
class SourceConfig:
    """One source of text, where more than its path is to be said."""

    path: str
    """A file, a folder, a pattern such as ``chats/*.jsonl``, or ``demo``."""
    name: str | None = None
    """What metrics and messages call it; null: the path's last part, without its ending."""
    weight: float | None = None
    """Its share of the rows of training, relative to the other sources'. Where one has a weight, null means 1; where
    none has, every row comes once an epoch, so that each source has the share of its size."""
    field: str = "text"
    """The field of a record that holds the text, or the messages, where it has another name."""


@dataclass(frozen=True)
class DataConfig:
    """Text, laid into rows of ``length`` tokens."""

    train: tuple[str | SourceConfig, ...] = ("demo",)
    """Files and folders, each a source of its own, or ``demo``: Shakespeare's plays and Python's own documentation. A
    path, or ``{path: ..., name: ..., weight: ...}``."""
    heldout: tuple[str | SourceConfig, ...] = ()
    """The same for evaluation, each a set with metrics of its own; empty splits off a tenth of the training text."""
    length: int = 128
    """Tokens of a row."""
    rows: int = 4
    """Rows of a micro-batch, over all devices."""
    micro_batches: int = 1
    """Micro-batches an optimizer step; their gradients are summed exactly."""
    max_train_tokens: int | None = None
    """Tokenise no more than about this many tokens of training text, an equal part of every source."""
    loss: Literal["all", "completion", "assistant"] = "all"
    """Which tokens the student learns to produce: all, those of the completion, or those of the assistant's turns."""
    template: str | None = None
    """File with the Jinja chat template; null: the tokenizer's own."""
    add_special: bool = True
    """Put around plain text, and prompt and completion, what the tokenizer's own rule puts there (a BOS, for some), and
    the EOS behind it, which is learned."""
    max_tokens: int | None = None
    """The most tokens of one record; null: no limit, and what is longer than a row is cut into several."""
    too_long: Literal["cut", "refuse"] = "cut"
    """What is above ``max_tokens`` is dropped, or makes a bad record."""
    pack: Literal["first_fit", "concatenate", "none"] = "first_fit"
    """How documents share rows: whole into the first row with room (only what is longer than a row is cut), one after
    another with a cut at the end of each row, or each in rows of its own."""
    shuffle: bool = True
    """False serves every epoch in the order of the text."""
    seed: int | None = None
    """Of the order of the rows; null: the run's."""
    on_bad: Literal["error", "skip"] = "error"
    """A record that cannot be used ends the run, or is left out and counted."""
    cache: str | None = "auto"
    """Folder where tokens are kept, so that a text is tokenised once; ``auto``: in the user's cache folder
    (``$SPMD_DISTILL_CACHE``, or else ``~/.cache/spmd_distill``); null: nowhere."""
    workers: int | None = None
    """Processes that tokenise; null: one a core where it takes long."""
    prefetch: int = 2
    """Batches that are prepared while a step runs; 0 prepares each when it is needed."""

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """What is trained on, each with its name."""
        return _named(self.train)

    @property
    def heldout_sources(self) -> tuple[SourceConfig, ...]:
        """What is evaluated on, each with its name; empty where it is split off."""
        return _named(self.heldout)

    def check(self) -> None:
        """Check what no type can say. Raises `UserError` naming the setting."""
        for name in ("length", "rows", "micro_batches", "max_train_tokens", "max_tokens", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"Run file: data.{name} is {value}; it must be at least 1.")
        for name in ("seed", "prefetch"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"Run file: data.{name} is {value}; it must be at least 0.")
        if not self.train:
            raise UserError("Run file: data.train is empty; it must name at least one file or folder, or demo.")
        for setting, sources in (("train", self.sources), ("heldout", self.heldout_sources)):
            _check_sources(f"data.{setting}", sources)
        for source in self.heldout_sources:
            if source.weight is not None:
                raise UserError(
                    f"Run file: data.heldout: {source.path} has weight {source.weight:g}; held-out sets are scored "
                    f"each by itself. Leave the weight out."
                )


def _named(sources: Sequence[str | SourceConfig]) -> tuple[SourceConfig, ...]:
    """Every source as a `SourceConfig` with a name; where two would have the same, each has its path's."""
    found = [SourceConfig(source) if isinstance(source, str) else source for source in sources]
    stems = [s.name or Path(s.path).stem or s.path for s in found]
    return tuple(
        SourceConfig(s.path, s.name or (stem if stems.count(stem) == 1 else s.path), s.weight, s.field)
        for s, stem in zip(found, stems, strict=True)
    )


def _check_sources(setting: str, sources: Sequence[SourceConfig]) -> None:
    seen: dict[str, str] = {}
    for number, source in enumerate(sources):
        if any(source.path == other.path and source.field == other.field for other in sources[:number]):
            raise UserError(
                f"Run file: {setting}: {source.path} is given twice. Its text would count double; name it once, with a "
                f"weight if it is to count more."
            )
        if source.path.lstrip()[:1] in ("{", "["):  # what the parser makes of a mapping with a wrong key
            raise UserError(
                f"Run file: {setting} holds {source.path!r}, which is no source. Expected a path, or a mapping with "
                f"path and, if wanted, name and weight, such as {{path: code.jsonl, weight: 2}}."
            )
        if source.weight is not None and not 0 < source.weight < float("inf"):
            raise UserError(
                f"Run file: {setting}: {source.path} has weight {source.weight:g}; expected a number above 0. Leave "
                f"the source out to train on none of it."
            )
        name = source.name or source.path
        if name in seen:
            raise UserError(
                f"Run file: {setting}: {seen[name]} and {source.path} are both called {name!r}. Expected each source "
                f"once, under a name of its own: {{path: {source.path}, name: ...}}."
            )
        seen[name] = source.path
