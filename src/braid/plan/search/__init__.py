"""The search for the fastest split of a training."""

from __future__ import annotations

from braid.plan.costs import Training
from braid.plan.search.elastic import fastest_mesh
from braid.plan.search.estimate import (
    Estimator,
)
from braid.plan.search.planner import Ranking, find_splits
from braid.plan.search.rescoring import program_of, rescore, timeline_of
from braid.plan.search.sensitivity import PART_NAMES, flips, reasons
from braid.plan.search.split import Split, splits

__all__ = [
    "PART_NAMES",
    "Estimator",
    "Ranking",
    "Split",
    "Training",
    "fastest_mesh",
    "find_splits",
    "flips",
    "program_of",
    "reasons",
    "rescore",
    "splits",
    "timeline_of",
]
