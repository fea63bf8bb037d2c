"""Losses between relations of tokens: what a hidden state has to do with others of its document."""

from spmd_distill.features.relations.alignment import CenteredKernelAlignment as CenteredKernelAlignment
from spmd_distill.features.relations.contrastive import Contrastive as Contrastive
from spmd_distill.features.relations.rkd import RelationalAngle as RelationalAngle
from spmd_distill.features.relations.rkd import RelationalDistance as RelationalDistance
from spmd_distill.features.relations.similarity import TokenSimilarity as TokenSimilarity
