"""Programs: the actions of every rank, as data; see README.md."""

from braid.programs.schedule.matching import match, messages, order
from braid.programs.schedule.program import Action, Header, Kind, Program, Vocabulary
from braid.programs.schedule.simulate import (
    Costs,
    Interval,
    NetworkModel,
    Route,
    Timeline,
    simulate,
)
from braid.programs.schedule.text import from_text, to_text
from braid.programs.schedule.validate import Rules, Violation, validate

__all__ = [
    "Action",
    "Costs",
    "Header",
    "Interval",
    "Kind",
    "NetworkModel",
    "Program",
    "Route",
    "Rules",
    "Timeline",
    "Violation",
    "Vocabulary",
    "from_text",
    "match",
    "messages",
    "order",
    "simulate",
    "to_text",
    "validate",
]
