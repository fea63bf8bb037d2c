"""Heads: from hidden states, unembeddings and targets to summed losses."""

from spmd_distill.head.base import AGREEMENT as AGREEMENT
from spmd_distill.head.base import AbstractHead as AbstractHead
from spmd_distill.head.base import HeadOutput as HeadOutput
from spmd_distill.head.base import Term as Term
from spmd_distill.head.fused import FusedHead
from spmd_distill.head.reference import ReferenceHead

__all__ = ["FusedHead", "ReferenceHead"]

HEADS: dict[str, type[AbstractHead]] = {"fused": FusedHead, "reference": ReferenceHead}
"""Head by the name that run files use."""
