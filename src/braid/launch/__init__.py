"""Starts the ranks of a run, supervises them, ends them together and names the rank that failed.

Names are loaded when first used: an agent, or a client of an engine, needs a few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braid.launch.cluster.options import Hosts, Nodes
    from braid.launch.cluster.rank_assignment import Host, parse_hostfile, parse_hosts
    from braid.launch.process.console import QuietConsole, TerminalConsole
    from braid.launch.process.job import RANK_VARIABLES, RESUME, ElasticLimits, JobSpec, Outcome
    from braid.launch.process.output import Console
    from braid.launch.supervise.local_backend import Supervisor
    from braid.launch.supervise.spawning import spawn

_MODULES = {
    "RANK_VARIABLES": "process.job",
    "RESUME": "process.job",
    "Console": "process.output",
    "Host": "cluster.rank_assignment",
    "Hosts": "cluster.options",
    "ElasticLimits": "process.job",
    "JobSpec": "process.job",
    "Nodes": "cluster.options",
    "Outcome": "process.job",
    "QuietConsole": "process.console",
    "Supervisor": "supervise.local_backend",
    "TerminalConsole": "process.console",
    "parse_hostfile": "cluster.rank_assignment",
    "parse_hosts": "cluster.rank_assignment",
    "spawn": "supervise.spawning",
}

__all__ = [
    "RANK_VARIABLES",
    "RESUME",
    "Console",
    "ElasticLimits",
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


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        msg = f"module 'braid.launch' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"braid.launch.{module}"), name)
    globals()[name] = value
    return value
