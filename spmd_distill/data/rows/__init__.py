"""Rows of tokens: examples in flat arrays, plans that lay them into rows, and several sources as one."""

from spmd_distill.data.rows.base import FIELDS, AbstractRows, Rows
from spmd_distill.data.rows.mixture import Mixture, Order
from spmd_distill.data.rows.packed import PackedRows
from spmd_distill.data.rows.plan import Plan, plan
from spmd_distill.data.rows.table import TokenTable

__all__ = ["FIELDS", "AbstractRows", "Mixture", "Order", "PackedRows", "Plan", "Rows", "TokenTable", "plan"]
