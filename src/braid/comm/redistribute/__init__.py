"""Changes of a tensor's layout by the cheapest collectives: plan and execution; see README.md."""

from __future__ import annotations

from braid.comm.redistribute.collectives import carry_out, move, redistribute
from braid.comm.redistribute.planner import plan
from braid.comm.redistribute.steps import AxisCost

__all__ = [
    "AxisCost",
    "carry_out",
    "move",
    "plan",
    "redistribute",
]
