"""Losses inside the network: between hidden states, attention maps and relations of teacher and student.

Each is a small class; a new one is a class and a line here, and every mapper, layout and test takes it.
"""

from spmd_distill.features.activation import ActivationMaps as ActivationMaps
from spmd_distill.features.attention import AttentionMaps as AttentionMaps
from spmd_distill.features.base import AbstractFeatureLoss as AbstractFeatureLoss
from spmd_distill.features.base import Side as Side
from spmd_distill.features.base import Tokens as Tokens
from spmd_distill.features.cka import linear_cka as linear_cka
from spmd_distill.features.distances import DISTANCES as DISTANCES
from spmd_distill.features.hidden import HiddenStates as HiddenStates
from spmd_distill.features.layer_maps import AbstractLayerMap as AbstractLayerMap
from spmd_distill.features.layer_maps import Explicit as Explicit
from spmd_distill.features.layer_maps import Last as Last
from spmd_distill.features.layer_maps import Pairs as Pairs
from spmd_distill.features.layer_maps import Uniform as Uniform
from spmd_distill.features.minilm import MiniLMRelations as MiniLMRelations
from spmd_distill.features.pairs import Compared as Compared
from spmd_distill.features.pairs import Inside as Inside
from spmd_distill.features.parameters import FEATURES_KEY as FEATURES_KEY
from spmd_distill.features.parameters import Trained as Trained
from spmd_distill.features.relations import CenteredKernelAlignment as CenteredKernelAlignment
from spmd_distill.features.relations import Contrastive as Contrastive
from spmd_distill.features.relations import RelationalAngle as RelationalAngle
from spmd_distill.features.relations import RelationalDistance as RelationalDistance
from spmd_distill.features.relations import TokenSimilarity as TokenSimilarity

__all__: list[str] = [
    "ActivationMaps",
    "AttentionMaps",
    "CenteredKernelAlignment",
    "Contrastive",
    "HiddenStates",
    "MiniLMRelations",
    "RelationalAngle",
    "RelationalDistance",
    "TokenSimilarity",
]

FEATURES: dict[str, type[AbstractFeatureLoss]] = {
    cls().name: cls
    for cls in (
        ActivationMaps, AttentionMaps, CenteredKernelAlignment, Contrastive, HiddenStates,
        MiniLMRelations, RelationalAngle, RelationalDistance, TokenSimilarity,
    )
}  # fmt: skip
"""Loss by the name that run files use."""
