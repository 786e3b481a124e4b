"""Layouts and collectives inserted into the graph of a model; see ../README.md."""

from __future__ import annotations

from braid.parallel.tensor_parallel.insertion.annotations import (
    Shard,
    Strategy,
    check_expressions,
    strategies_in,
)
from braid.parallel.tensor_parallel.insertion.by_graph import divide_by_graph
from braid.parallel.tensor_parallel.insertion.explain import Division
from braid.parallel.tensor_parallel.insertion.records import InsertionOptions

__all__ = [
    "Division",
    "InsertionOptions",
    "Shard",
    "Strategy",
    "check_expressions",
    "divide_by_graph",
    "strategies_in",
]
