"""Programs: the actions of every rank, as data; see README.md."""

from braid.schedule.matching import match, messages, order
from braid.schedule.program import Action, Header, Kind, Program, Vocabulary
from braid.schedule.simulate import Costs, Interval, Network, Route, Timeline, simulate
from braid.schedule.text import from_text, to_text
from braid.schedule.validate import Rules, validate
from braid.schedule.violation import Violation

__all__ = [
    "Action",
    "Costs",
    "Header",
    "Interval",
    "Kind",
    "Network",
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
