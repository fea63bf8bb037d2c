"""Teachers: what the student is compared with. Nothing of a teacher is ever trained, donated or saved."""

from dataclasses import dataclass
from typing import Any

import jax

from spmd_distill.models import Shard
from spmd_distill.models.foreign import AnyModel
from spmd_distill.models.taps import Wanted
from spmd_distill.types import Batch, Params, Unembedded


@dataclass(frozen=True)
class OnlineTeacher:
    """A model that runs beside the student, in the same compiled program, always without dropout."""

    model: AnyModel

    def targets(self, params: Params, batch: Batch, shard: Shard, taps: Wanted) -> tuple[Unembedded, dict[str, Any]]:
        """Hidden states and unembedding on this shard's rows, and what ``taps`` keep; all cut from any gradient."""
        return jax.lax.stop_gradient(self.model.apply_tapped(jax.lax.stop_gradient(params), batch, shard, taps))
