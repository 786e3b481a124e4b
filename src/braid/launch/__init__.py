"""launch: start the ranks of a run, watch them, end them together, say who is guilty; see README.md."""

from __future__ import annotations

from braid.launch.console import QuietConsole, TerminalConsole
from braid.launch.job import JobSpec, Outcome
from braid.launch.output import Console
from braid.launch.spawning import spawn
from braid.launch.supervisor import Supervisor

__all__ = [
    "Console",
    "JobSpec",
    "Outcome",
    "QuietConsole",
    "Supervisor",
    "TerminalConsole",
    "spawn",
]
