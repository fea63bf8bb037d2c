"""Sources -> tables of tokens: made once, by several processes where it takes long, and kept on disk."""

from spmd_distill.data.tokens.cache import Settings, token_table

__all__ = ["Settings", "token_table"]
