"""Text -> documents -> packed rows -> the global batch of any optimizer step."""

from spmd_distill.data.base import AbstractSource, BadRecord, Example, Record
from spmd_distill.data.demo import demo_documents
from spmd_distill.data.encode import Encoder, make_encoder
from spmd_distill.data.intake import Intake, IntakeReport
from spmd_distill.data.loader import Loader, eval_batches
from spmd_distill.data.packing import check_vocabulary, pack
from spmd_distill.data.prefetch import Prefetch
from spmd_distill.data.rows import AbstractRows, Mixture, PackedRows, Plan, Rows, TokenTable, plan
from spmd_distill.data.sources import JoinedSource, open_source
from spmd_distill.data.text import Document, pydoc_topics, read_documents, split_documents

__all__ = [
    "AbstractRows",
    "AbstractSource",
    "BadRecord",
    "Document",
    "Encoder",
    "Example",
    "Intake",
    "IntakeReport",
    "JoinedSource",
    "Loader",
    "Mixture",
    "PackedRows",
    "Plan",
    "Prefetch",
    "Record",
    "Rows",
    "TokenTable",
    "check_vocabulary",
    "demo_documents",
    "eval_batches",
    "make_encoder",
    "open_source",
    "pack",
    "plan",
    "pydoc_topics",
    "read_documents",
    "split_documents",
]
