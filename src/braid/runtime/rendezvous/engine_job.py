"""Names of jobs and addresses of hosts that are missing from an engine's variables.

MPICH gives a job no name, but all of its processes on a host have a common proxy process as
ancestor. Slurm uses node names of its configuration, which the resolver may not know, but Slurm
does.
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
    """Return a name of this process's MPICH job on this host; empty if there is none."""
    with suppress(psutil.Error):
        for parent in psutil.Process().parents():
            if parent.name().startswith(PROXIES):
                return f"{parent.pid}-{parent.create_time():.2f}"
    return ""


def address_of_node(name: str) -> str:
    """Return `name` if it can be resolved, else the address that Slurm has for this node."""
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
    """Return the networks of this host's interfaces, without networks inside the host.

    A bridge for containers often has the same address on each host, where it reaches only itself.
    """
    networks = [
        ipaddress.ip_network(f"{interface.ip}/{interface.prefix}", strict=False)
        for interface in interfaces()
        if not (INTERFACES / interface.name / "bridge").exists()
    ]
    return [network for network in networks if not network.is_loopback]
