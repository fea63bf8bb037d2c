"""What a run learns from: the teacher, the tokenizer and the text, as they were when its checkpoint was saved."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmd_distill.assets import demo_assets_there
from spmd_distill.config import RunConfig
from spmd_distill.corpus import encoder_of, heldout_documents, training_sources
from spmd_distill.data import open_source
from spmd_distill.doctor.finding import Finding
from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer
from spmd_distill.loading import DEMO, Checkpoint, find_source, open_checkpoint
from spmd_distill.resuming import difference, fingerprint_weights

_BACK = "Bring it back, or resume with --{} where it is now."
_ALLOW = "Give what it was, or resume with --allow-changes."


def check_models(config: RunConfig, run: Path, meta: Mapping[str, Any]) -> tuple[TextTokenizer | None, list[Finding]]:
    """Check the teacher, and what the student starts from.

    Args:
        config: the run's settings.
        run: its folder.
        meta: what was saved with its newest good checkpoint; empty where there is none.

    Returns:
        The tokenizer of the run's text, or None where it cannot be had now; and the findings.
    """
    path, about = config.teacher.path, "teacher.path"
    if path == DEMO and not demo_assets_there():
        return None, [
            Finding("note", about, "the demo's teacher is not in the cache.", "Nothing: it is fetched again.")
        ]
    try:
        teacher = open_checkpoint(find_source(path))
        about = "student.init"
        tokenizer = (_start(config, run) or teacher).tokenizer
    except UserError as error:
        return None, [Finding("problem", about, str(error), _BACK.format(f"{about} PATH"), blocks=True)]
    return tokenizer, [*_teacher(path, teacher, meta), *_tokenizer(tokenizer, meta)]


def _start(config: RunConfig, run: Path) -> Checkpoint | None:
    """The model that the student started from, where it has a tokenizer of its own."""
    if config.student.pruned:
        start = run / "start"
        return open_checkpoint(start) if (start / "config.json").exists() else None
    return None if config.student.init in ("teacher", "random") else open_checkpoint(config.student.init)


def _teacher(path: str, teacher: Checkpoint, meta: Mapping[str, Any]) -> Iterator[Finding]:
    then, now = meta.get("teacher"), fingerprint_weights(teacher.source.path)
    if then is None:
        yield Finding("ok", "teacher.path", f"{path} opens; no checkpoint to compare it with.")
    elif then == now:
        yield Finding("ok", "teacher.path", f"{path} is what the checkpoint remembers.")
    else:
        found = f"{path} is another teacher: {difference(then, now)}."
        yield Finding("problem", "teacher.path", found, _ALLOW, blocks=True)


def _tokenizer(tokenizer: TextTokenizer, meta: Mapping[str, Any]) -> Iterator[Finding]:
    then, now = meta.get("tokenizer"), tokenizer.fingerprint()
    if then is not None and then != now:
        found = f"is not what the checkpoint remembers (fingerprint {then[:12]}, now {now[:12]})."
        yield Finding("problem", "tokenizer", found, "Give the teacher that the run was started with.", blocks=True)
    elif then is not None:
        yield Finding("ok", "tokenizer", "is what the checkpoint remembers.")


def check_text(config: RunConfig, tokenizer: TextTokenizer | None, meta: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that the text is there and is what the checkpoint remembers; nothing is tokenised.

    Without a ``tokenizer``, how text becomes tokens is not compared. Of held-out text of its own, only that it is
    there: what its rows are is seen when they are made.
    """
    sources = (*config.data.sources, *config.data.heldout_sources)
    if any(source.path == DEMO for source in sources) and not demo_assets_there():
        yield Finding("note", "data.train", "the demo's text is not in the cache.", "Nothing: it is fetched again.")
        return
    known = meta.get("data", {})
    try:
        found = {name: source.fingerprint() for name, source in training_sources(config.data).items()}
    except UserError as error:
        yield Finding("problem", "data.train", str(error), _BACK.format("data.train [PATH]"), blocks=True)
        return
    for name, fingerprint in found.items():
        then = known.get("text" if "text" in known else f"{name}.text")
        if then is None:
            yield Finding("ok", f"data.train, {name}", "is there; no checkpoint to compare it with.")
        elif then == fingerprint:
            yield Finding("ok", f"data.train, {name}", "is what the checkpoint remembers.")
        else:
            said = f"its text is not what the run was trained on (fingerprint {then[:12]}, now {fingerprint[:12]})."
            yield Finding("problem", f"data.train, {name}", said, "Give the text that it was.", blocks=True)
    try:
        for source in config.data.heldout_sources:
            if heldout_documents(source) is None:
                open_source(source.path, source.name, field=source.field).fingerprint()
            yield Finding("ok", f"data.heldout, {source.name}", "is there.")
        encoding = None if tokenizer is None else encoder_of(config.data, tokenizer).fingerprint()
    except UserError as error:
        yield Finding("problem", "data", str(error), "Bring it back.", blocks=True)
        return
    then = {value for key, value in known.items() if key == "encoding" or key.endswith(".encoding")}
    if encoding is not None and then and then != {encoding}:
        found_text = "text becomes other tokens than the checkpoint remembers: the chat template is another."
        yield Finding("problem", "data.template", found_text, "Give the template that it was.", blocks=True)
