"""Heads: from hidden states, unembeddings and targets to summed losses."""

from spmd_distill.head.base import AGREEMENT as AGREEMENT
from spmd_distill.head.base import AbstractHead as AbstractHead
from spmd_distill.head.base import HeadOutput as HeadOutput
from spmd_distill.head.base import Term as Term
from spmd_distill.head.base import common_vocabulary as common_vocabulary
from spmd_distill.head.fused import FusedHead
from spmd_distill.head.reference import ReferenceHead
from spmd_distill.head.support import FULL as FULL
from spmd_distill.head.support import Full as Full
from spmd_distill.head.support import Sampled as Sampled
from spmd_distill.head.support import Support as Support
from spmd_distill.head.support import TopK as TopK

__all__ = ["FusedHead", "ReferenceHead"]

HEADS: dict[str, type[AbstractHead]] = {"fused": FusedHead, "reference": ReferenceHead}
"""Head by the name that run files use."""
