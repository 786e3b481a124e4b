"""The search for the fastest split of a training."""

from __future__ import annotations

from braid.plan.search.estimate import Estimate, Estimator, Memory, StepTime, Training
from braid.plan.search.failures import Failures, Solution, time_to_solution
from braid.plan.search.planner import Ranking, find_splits
from braid.plan.search.rescoring import action_s, program_of, rescore, timeline_of
from braid.plan.search.sensitivity import PART_NAMES, Flip, flips, reasons
from braid.plan.search.split import Split, splits

__all__ = [
    "PART_NAMES",
    "Estimate",
    "Estimator",
    "Failures",
    "Flip",
    "Memory",
    "Ranking",
    "Solution",
    "Split",
    "StepTime",
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
