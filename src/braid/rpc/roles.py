"""Roles of the nodes, as `braid run --role ps:1 --role trainer:2` gives them to ranks.

Ranks 0, 1, 2 are then the nodes `ps:0`, `trainer:0` and `trainer:1`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from braid.errors import ConfigError
from braid.runtime.variables import RESTARTS, ROLES

__all__ = ["Role", "names_of", "num_restarts", "own_role"]


class Role(NamedTuple):
    """Role of a node, such as actor 2 of 8, from the launcher's `--role`.

    Attributes:
        name: Name of the role.
        number: Index of the node among the nodes of its role.
        size: Number of nodes of the role.
    """

    name: str
    number: int
    size: int

    @property
    def node(self) -> str:
        """Name of the node."""
        return f"{self.name}:{self.number}"


def own_role(environ: Mapping[str, str] | None = None) -> Role:
    """Return the role of this process.

    Args:
        environ: Environment variables; `os.environ` when None.

    Raises:
        ConfigError: The launcher has given no roles.
    """
    environ = os.environ if environ is None else environ
    rank = int(environ.get("RANK", "0"))
    for name, count in _roles(environ):
        if rank < count:
            return Role(name, rank, count)
        rank -= count
    msg = (
        f"rank {environ.get('RANK')} is not in the roles {environ.get(ROLES)!r}: start the program "
        "with braid run --role NAME:COUNT"
    )
    raise ConfigError(msg)


def names_of(role: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of all nodes of a role.

    Raises:
        ConfigError: No such role exists.
    """
    counts = dict(_roles(os.environ if environ is None else environ))
    if role not in counts:
        msg = f"unknown role {role!r}: the launcher has started {', '.join(counts)}"
        raise ConfigError(msg)
    return [f"{role}:{index}" for index in range(counts[role])]


def num_restarts() -> int:
    """Return how many lost processes the launcher may replace (`braid run --restarts`)."""
    text = os.environ.get(RESTARTS, "0")
    return int(text) if text.isdecimal() else 0


def _roles(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    text = environ.get(ROLES, "")
    if not text:
        msg = "this process has no role: start the program with braid run --role NAME:COUNT ..."
        raise ConfigError(msg)
    parts = [part.partition(":") for part in text.split(",")]
    return [(name, int(count)) for name, _, count in parts]
