"""Places of ranks, and the pairs of ranks between which each level is measured.

A place is a path from the top: (host, NUMA node). Messages of a level are those between its
children. The first rank of each child represents it, so that one message on each link is measured:

    places         (0,0) (0,0) (0,1) (0,1)  (1,0) (1,0) (1,1) (1,1)
    rank             0     1     2     3      4     5     6     7
    node   rings   [ 0     1 ] [ 2     3 ]  [ 4     5 ] [ 6     7 ]
    host   rings   [ 0           2       ]  [ 4           6       ]
    network        [ 0                        4                   ]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from braid.errors import ConfigError

__all__ = ["LEVEL_NAMES", "Rings", "cpus_of", "levels", "node_of", "rings"]

LEVEL_NAMES = ("node", "host", "network")
Place = tuple[int, int]


class Rings(NamedTuple):
    """A level of a cluster, and the rings of ranks over which its links are measured.

    Attributes:
        name: Name of a unit of the level.
        size: Number of children of each unit.
        rings: Rings of ranks; each rank sends to the next one in its ring.
    """

    name: str
    size: int
    rings: tuple[tuple[int, ...], ...]


def rings(places: Sequence[Place]) -> list[Rings]:
    """Return the levels of a cluster, lowest first, given the host and NUMA node of each rank.

    Levels with one child per unit are omitted.

    Args:
        places: (host, NUMA node) of each rank; the ranks of a unit must be consecutive.

    Raises:
        ConfigError: Units of one level have different numbers of children, or the ranks of a unit
            are not consecutive.
    """
    split = len(set(places)) > len({host for host, _ in places})  # some host has several nodes
    if split:
        return levels(places, LEVEL_NAMES)
    return levels([(host,) for host, _ in places], LEVEL_NAMES[1:])


def levels(paths: Sequence[tuple[int, ...]], names: Sequence[str]) -> list[Rings]:
    """Return the levels of a cluster, given the path from the top of the tree to each rank.

    Levels with one child per unit are omitted.

    Args:
        paths: For each rank, the number of its unit at every level but the highest, top first.
        names: Names of the levels, lowest first; one more than a path has numbers.

    Raises:
        ConfigError: See `rings`.
    """
    if len(paths) < 2:
        msg = f"at least 2 ranks are needed to measure messages, got {len(paths)}: start more ranks"
        raise ConfigError(msg)
    result = []
    children: list[tuple[tuple[int, ...], int]] = [  # path and first rank
        ((*path, rank), rank) for rank, path in enumerate(paths)
    ]
    for name in names:
        units: dict[tuple[int, ...], list[int]] = {}
        for path, rank in children:
            units.setdefault(path[:-1], []).append(rank)
        counts = [len(ranks) for ranks in units.values()]
        if len(set(counts)) > 1:
            msg = (
                f"the units of level {name} contain different numbers of units, "
                f"{', '.join(map(str, counts))}: use the same number in each"
            )
            raise ConfigError(msg)
        if _torn(children):
            msg = (
                f"the ranks of one {name} are not numbered consecutively, got locations "
                f"{list(paths)}: start the ranks in the order of their hosts"
            )
            raise ConfigError(msg)
        if counts[0] > 1:
            result.append(Rings(name, counts[0], tuple(map(tuple, units.values()))))
        children = [(path, ranks[0]) for path, ranks in units.items()]
    return result


def _torn(children: Sequence[tuple[tuple[int, ...], int]]) -> bool:
    """Return whether a unit comes back after another one."""
    units = [path[:-1] for path, _ in children]
    changes = sum(a != b for a, b in pairwise(units))
    return changes + 1 > len(set(units))


def cpus_of(listed: str) -> tuple[int, ...]:
    """Parse a list of CPUs in the format of Linux, such as `0-3,8-11`; it may be empty.

    Raises:
        ConfigError: The text is not such a list.
    """
    cpus: list[int] = []
    for part in filter(None, listed.strip().split(",")):
        low, dash, high = part.partition("-")
        if not (low.isdecimal() and low.isascii()) or (
            dash and not (high.isdecimal() and high.isascii())
        ):
            msg = f"{listed.strip()!r} is not a list of processors such as 0-3,8-11"
            raise ConfigError(msg)
        cpus += range(int(low), int(high or low) + 1)
    return tuple(cpus)


def node_of(local_rank: int, local_size: int, num_nodes: int) -> int:
    """Return the NUMA node for a rank: consecutive ranks share a node, equally many on each.

    If the ranks cannot be divided equally over the nodes, all ranks use node 0.

    """
    if num_nodes < 1 or local_size % num_nodes:
        return 0
    return local_rank * num_nodes // local_size
