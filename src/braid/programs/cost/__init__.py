"""Costs of collectives: seconds, bytes and messages; see README.md."""

from braid.programs.cost.carrying import Phase, hierarchical_s, pipelined_s, program_s
from braid.programs.cost.compare import Comparison, compare
from braid.programs.cost.forms import FORMS, Cost, form
from braid.programs.cost.rounds import Estimate, messages_s, simulate_rounds

__all__ = [
    "FORMS",
    "Comparison",
    "Cost",
    "Estimate",
    "Phase",
    "compare",
    "form",
    "hierarchical_s",
    "messages_s",
    "pipelined_s",
    "program_s",
    "simulate_rounds",
]
