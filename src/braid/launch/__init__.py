"""Starts the ranks of a run, supervises them, ends them together and names the rank that failed."""

from __future__ import annotations

from braid.launch.cluster.options import Hosts, Nodes
from braid.launch.cluster.rank_assignment import Host, parse_hostfile, parse_hosts
from braid.launch.process.console import QuietConsole, TerminalConsole
from braid.launch.process.job import RANK_VARIABLES, RESUME, JobSpec, Outcome
from braid.launch.process.output import Console
from braid.launch.supervise.spawning import spawn
from braid.launch.supervise.supervisor import Supervisor

__all__ = [
    "RANK_VARIABLES",
    "RESUME",
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
