"""The search for the fastest split of a training."""

from __future__ import annotations

from braid.plan.search.estimate import (
    Estimator,
    MemoryEstimate,
    SplitEstimate,
    StepTimeEstimate,
    Training,
)
from braid.plan.search.failures import Failures, Solution, time_to_solution
from braid.plan.search.planner import Ranking, find_splits
from braid.plan.search.rescoring import action_s, program_of, rescore, timeline_of
from braid.plan.search.sensitivity import PART_NAMES, Flip, flips, reasons
from braid.plan.search.split import Split, splits

__all__ = [
    "PART_NAMES",
    "Estimator",
    "Failures",
    "Flip",
    "MemoryEstimate",
    "Ranking",
    "Solution",
    "Split",
    "SplitEstimate",
    "StepTimeEstimate",
    "Training",
    "action_s",
    "find_splits",
    "flips",
    "program_of",
    "reasons",
    "rescore",
    "splits",
    "time_to_solution",
    "timeline_of",
]
