"""Programs: the actions of every rank, as data; see README.md."""

from braid.programs.schedule.matching import match, messages, order
from braid.programs.schedule.program import Action, Header, Kind, Program, Vocabulary
from braid.programs.schedule.simulate import (
    Costs,
    Interval,
    Route,
    Timeline,
    simulate,
)
from braid.programs.schedule.text import from_text, to_text
from braid.programs.schedule.validate import Rules, validate

__all__ = [
    "Action",
    "Costs",
    "Header",
    "Interval",
    "Kind",
    "Program",
    "Route",
    "Rules",
    "Timeline",
    "Vocabulary",
    "from_text",
    "match",
    "messages",
    "order",
    "simulate",
    "to_text",
    "validate",
]
