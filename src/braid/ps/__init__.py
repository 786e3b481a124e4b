"""A parameter server: tables on servers, from which workers pull, and to which they push."""

from __future__ import annotations

from braid.ps.consistency import BSP, Consistency
from braid.ps.dense import DenseTable
from braid.ps.node import Node, Options, join

__all__ = ["BSP", "Consistency", "DenseTable", "Node", "Options", "join"]
