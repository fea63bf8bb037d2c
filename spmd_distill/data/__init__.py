"""Text -> documents -> packed rows -> the global batch of any optimizer step."""

from spmd_distill.data.demo import demo_documents
from spmd_distill.data.loader import Loader, eval_batches
from spmd_distill.data.packing import Rows, check_vocabulary, pack
from spmd_distill.data.text import Document, pydoc_topics, read_documents, split_documents

__all__ = [
    "Document",
    "Loader",
    "Rows",
    "check_vocabulary",
    "demo_documents",
    "eval_batches",
    "pack",
    "pydoc_topics",
    "read_documents",
    "split_documents",
]
