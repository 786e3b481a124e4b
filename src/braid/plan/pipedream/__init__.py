"""PipeDream's profile and its optimizer."""

from __future__ import annotations

from braid.plan.pipedream.antichains import states_of
from braid.plan.pipedream.graph_text import (
    ProfiledGraph,
    ProfiledNode,
    format_graph,
    parse_graph,
)
from braid.plan.pipedream.memory import MemoryLimit
from braid.plan.pipedream.plan_file import PipeDreamPlan
from braid.plan.pipedream.recurrences import (
    MachineLevel,
    StagePlan,
    partition,
)

__all__ = [
    "MachineLevel",
    "MemoryLimit",
    "PipeDreamPlan",
    "ProfiledGraph",
    "ProfiledNode",
    "StagePlan",
    "format_graph",
    "parse_graph",
    "partition",
    "states_of",
]
