"""A smaller model made of parts of a larger one: what matters, what is kept, what it costs."""

from spmd_distill.prune.importance import Importance as Importance
from spmd_distill.prune.importance import activations as activations
from spmd_distill.prune.importance import agreement as agreement
from spmd_distill.prune.importance import layers_to_keep as layers_to_keep
from spmd_distill.prune.importance import measure_removals as measure_removals
from spmd_distill.prune.keep import Keep as Keep
from spmd_distill.prune.keep import cut as cut
from spmd_distill.prune.keep import evenly as evenly
from spmd_distill.prune.keep import keep_by_importance as keep_by_importance

__all__ = [
    "Importance",
    "Keep",
    "activations",
    "agreement",
    "cut",
    "evenly",
    "keep_by_importance",
    "layers_to_keep",
    "measure_removals",
]
