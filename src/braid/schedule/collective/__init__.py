"""Algorithms of collectives, as data: see the README of `schedule`."""

from braid.schedule.collective.catalogue import ALGORITHMS, algorithm
from braid.schedule.collective.contributions import check_contributions, check_slots
from braid.schedule.collective.costs import collective_costs
from braid.schedule.collective.rounds import Copy, Round, Rounds, program
from braid.schedule.collective.vocabulary import COLLECTIVE, OPERATIONS

__all__ = [
    "ALGORITHMS",
    "COLLECTIVE",
    "OPERATIONS",
    "Copy",
    "Round",
    "Rounds",
    "algorithm",
    "check_contributions",
    "check_slots",
    "collective_costs",
    "program",
]
