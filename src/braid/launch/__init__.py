"""launch: start the ranks of a run, watch them, end them together, say who is guilty; see README.md."""

from __future__ import annotations

from braid.launch.console import QuietConsole, TerminalConsole
from braid.launch.hosts import Host, parse_hostfile, parse_hosts
from braid.launch.job import JobSpec, Outcome
from braid.launch.output import Console
from braid.launch.spawning import spawn
from braid.launch.supervisor import Supervisor
from braid.launch.where import Hosts, Nodes

__all__ = [
    "Console",
    "Host",
    "Hosts",
    "JobSpec",
    "Nodes",
    "Outcome",
    "QuietConsole",
    "Supervisor",
    "TerminalConsole",
    "parse_hostfile",
    "parse_hosts",
    "spawn",
]
