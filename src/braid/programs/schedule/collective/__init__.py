"""Algorithms of collectives, as data: see the README of `schedule`."""

from braid.programs.schedule.collective.catalogue import ALGORITHMS, algorithm
from braid.programs.schedule.collective.contributions import check_contributions, check_slots
from braid.programs.schedule.collective.rounds import Round, Rounds, collective_costs, program
from braid.programs.schedule.collective.vocabulary import COLLECTIVE, OPERATIONS

__all__ = [
    "ALGORITHMS",
    "COLLECTIVE",
    "OPERATIONS",
    "Round",
    "Rounds",
    "algorithm",
    "check_contributions",
    "check_slots",
    "collective_costs",
    "program",
]
