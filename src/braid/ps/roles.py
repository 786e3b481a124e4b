"""Roles of a parameter server's nodes, and their names as a van knows them."""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["SCHEDULER", "SPARE", "Role", "name_of", "role_of", "server_node", "worker_node"]

Role: TypeAlias = Literal["scheduler", "server", "worker", "spare"]
SCHEDULER = "scheduler"
SPARE = "spare"


def server_node(number: int) -> str:
    """Return the name of a server."""
    return f"server:{number}"


def worker_node(number: int) -> str:
    """Return the name of a worker."""
    return f"worker:{number}"


def name_of(role: Role, number: int) -> str:
    """Return the name of a node."""
    return SCHEDULER if role == "scheduler" else f"{role}:{number}"


def role_of(rank: int, servers: int) -> tuple[Role, int]:
    """Return role and number of a rank: the scheduler comes first, then servers, then workers."""
    if rank == 0:
        return "scheduler", 0
    return ("server", rank - 1) if rank <= servers else ("worker", rank - 1 - servers)
