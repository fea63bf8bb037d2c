"""Records from files of many kinds, on this machine or behind an address."""

from spmd_distill.data.sources.json_lines import json_kind
from spmd_distill.data.sources.open import READERS, JoinedSource, open_source

__all__ = ["READERS", "JoinedSource", "json_kind", "open_source"]
