"""Names of jobs and addresses of hosts that an engine's variables leave out.

MPICH gives a job no name, but all of its processes on a host have one proxy above them. Slurm names
nodes as its configuration does, which the resolver may not know; Slurm itself does.
"""

from __future__ import annotations

import ipaddress
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

from braid.runtime.rendezvous.engine_ranks import IPNetwork
from braid.runtime.rendezvous.interfaces import interfaces

__all__ = ["address_of_node", "name_of_job", "shared_networks"]

PROXIES = ("hydra_pmi_proxy", "hydra_bstrap_proxy")
INTERFACES = Path("/sys/class/net")
LIMIT_S = 10.0


def name_of_job() -> str:
    """Return a name of this process's MPICH job on this host; empty without one."""
    with suppress(psutil.Error):
        for parent in psutil.Process().parents():
            if parent.name().startswith(PROXIES):
                return f"{parent.pid}-{parent.create_time():.2f}"
    return ""


def address_of_node(name: str) -> str:
    """Return a name that can be resolved, or the address that Slurm has for a node."""
    with suppress(OSError):
        socket.getaddrinfo(name, None)
        return name
    with suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(
            ["scontrol", "show", "node", name, "--oneliner"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        words = dict(word.partition("=")[::2] for word in answer.stdout.split())
        return words.get("NodeAddr", name)
    return name


def shared_networks() -> list[IPNetwork]:
    """Return the networks of this host's interfaces, but not those that lie inside of it.

    A bridge for containers often has the same address on each host, where it leads to itself.
    """
    networks = [
        ipaddress.ip_network(f"{interface.ip}/{interface.prefix}", strict=False)
        for interface in interfaces()
        if not (INTERFACES / interface.name / "bridge").exists()
    ]
    return [network for network in networks if not network.is_loopback]
