"""A cluster as a tree of switches: contents of a host, a rack, a hall, and the speed of the links.

    level    children per unit   latency of a message that turns around here, and
                                 bandwidth of each child's link to here
    socket   4 ranks              1 us    20 GB/s       rank 0 1 2 3 | 4 5 6 7 || 8 9 ...
    host     2 sockets (UPI)      2 us    40 GB/s            socket      |     ||
    rack     16 hosts             5 us    25 GB/s               host ----+     ||
    spine    8 racks, 4 : 1      10 us   100 GB/s                       rack --++

Ranks are numbered host by host, so the place in the tree is arithmetic: unit u of a level holds the
ranks u * n to (u + 1) * n - 1. A message goes up to the first level that both ends have in common
and down again, over one link of each child on the way. With full duplex, up and down are separate
links. The level at which a message turns around defines its latency; bandwidth is shared, link by
link (`schedule.simulate`). Oversubscription is the total bandwidth of the links of a unit's
children, divided by the bandwidth of the unit's link upwards.

Source: C. Leiserson, Fat-trees, IEEE ToC 34 (1985), for the shape.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from braid.errors import ConfigError
from braid.programs.schedule import Route
from braid.programs.topology.device import Device

__all__ = ["Cluster", "Level", "flat"]

MOST_RANKS = 10**6  # each rank has two links or more
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Level of a cluster: units of one kind, such as hosts. A unit's switch connects its children.

    Attributes:
        name: Name of a unit, such as host.
        size: Number of children of a unit: ranks for the first level, else units of the level
            below.
        latency_s: Seconds until the first byte of a message arrives, if this level is the highest
            on its route.
        bytes_per_s: Bandwidth of the link between a child and its unit.
        full_duplex: Whether each direction of a link has this bandwidth; else both share it.
        by_size: Largest rate of one message, by its size: pairs (bytes, bytes per second) with
            ascending sizes, interpolated linearly over the logarithm of the size. If empty, only
            the link limits a message.
        burst_bytes: Bytes that a link can carry above its rate after an idle time. Clouds limit
            networks by such a token bucket.
    """

    name: str
    size: int
    latency_s: float
    bytes_per_s: float
    full_duplex: bool = True
    by_size: tuple[tuple[float, float], ...] = ()
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if type(self.size) is not int or self.size < 1:
            problems.append(f"size must be a whole number of at least 1, got {self.size}")
        if not 0 <= self.latency_s < float("inf"):
            problems.append(f"latency_s must be at least 0, got {self.latency_s}")
        if not 0 < self.bytes_per_s < float("inf"):
            problems.append(f"bytes_per_s must be above 0, got {self.bytes_per_s}")
        if not 0 <= self.burst_bytes < float("inf"):
            problems.append(f"burst_bytes must be at least 0, got {self.burst_bytes}")
        sizes = [nbytes for nbytes, _ in self.by_size]
        figures = [figure for pair in self.by_size for figure in pair]
        if sizes != sorted(set(sizes)) or not all(0 < figure < float("inf") for figure in figures):
            problems.append(
                f"by_size must have ascending sizes and rates above 0, got {self.by_size}"
            )
        if problems:
            msg = f"level {self.name!r} of the cluster: {'; '.join(problems)}"
            raise ConfigError(msg)

    def max_rates(self, nbytes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the largest rates of messages of these sizes, in bytes per second."""
        if not self.by_size:
            return np.full(len(nbytes), np.inf)
        sizes, rates = np.array(self.by_size).T
        limits: npt.NDArray[np.float64] = np.interp(
            np.log(np.maximum(nbytes, 1.0)), np.log(sizes), rates
        )
        return limits


class Cluster:
    """Tree-shaped network of ranks, such as hosts in racks, for cost estimates and simulations.

    Args:
        levels: Levels, from the ranks upwards.
        device: Device of each rank, if it is described.

    Raises:
        ConfigError: `levels` is empty, or two levels have the same name.
    """

    def __init__(self, levels: Sequence[Level], device: Device | None = None) -> None:
        names = [level.name for level in levels]
        if not names or len(set(names)) < len(names):
            msg = (
                "a cluster needs at least one level, each with a different name, got "
                f"{', '.join(names) or 'none'}"
            )
            raise ConfigError(msg)
        self.levels = tuple(levels)
        self.device = device
        sizes = [1, *(level.size for level in levels)]
        # Number of ranks of a child, by level; the last is the number of all ranks.
        self._widths: list[int] = list(accumulate(sizes, operator.mul))
        if self.num_ranks > MOST_RANKS:
            msg = f"a cluster may have at most {MOST_RANKS:,} ranks, got {self.num_ranks:,}: {self}"
            raise ConfigError(msg)
        num_children = [self.num_ranks // width for width in self._widths[:-1]]
        firsts = np.cumsum([0, *(2 * n for n in num_children)])
        self._first_links: list[int] = firsts.tolist()

    @property
    def num_ranks(self) -> int:
        """World size."""
        return self._widths[-1]

    def __str__(self) -> str:
        """Return the sizes of the levels, as in `8 (host) x 16 (rack)`."""
        return " x ".join(f"{level.size} ({level.name})" for level in self.levels)

    def __eq__(self, other: object) -> bool:
        """Return whether levels and device are equal."""
        if not isinstance(other, Cluster):
            return NotImplemented
        return (self.levels, self.device) == (other.levels, other.device)

    def __hash__(self) -> int:
        """Return the hash of the levels."""
        return hash(self.levels)

    @cached_property
    def bytes_per_s(self) -> npt.NDArray[np.float64]:
        """Bandwidth of every link, in bytes per second.

        The two directions of a child's link are adjacent: up, then down.
        """
        counts = np.diff(self._first_links)
        return np.repeat([level.bytes_per_s for level in self.levels], counts)

    @cached_property
    def burst_bytes(self) -> npt.NDArray[np.float64]:
        """Bytes that each link can carry above its rate after an idle time."""
        counts = np.diff(self._first_links)
        return np.repeat([level.burst_bytes for level in self.levels], counts)

    def check_size(self, num_ranks: int) -> None:
        """Raise ConfigError if the cluster has fewer than `num_ranks` ranks."""
        if num_ranks > self.num_ranks:
            msg = (
                f"the cluster has {self.num_ranks} ranks ({self}), got {num_ranks}: use fewer "
                "ranks, or a larger cluster"
            )
            raise ConfigError(msg)

    def level_number(self, name: str) -> int:
        """Return the position of the level `name`; ConfigError if the cluster has none."""
        names = [level.name for level in self.levels]
        if name not in names:
            msg = f"the cluster has no level {name!r}: choose one of {', '.join(names)}"
            raise ConfigError(msg)
        return names.index(name)

    def oversubscription(self, name: str) -> float:
        """Return the oversubscription of level `name`: above 1, its links can be a bottleneck.

        It is the bandwidth of all links below a unit, divided by the bandwidth of the unit's link
        to level `name`. For the first level it is 1.
        """
        number = self.level_number(name)
        if not number:
            return 1.0
        below = self.levels[number - 1]
        return below.size * below.bytes_per_s / self.levels[number].bytes_per_s

    def route(self, source: int, target: int, nbytes: float = 0.0) -> Route:
        """Return the route of a message between two ranks."""
        latency, links = self.routes(np.array([source]), np.array([target]))
        rates = self.max_rates(links, np.array([nbytes]))
        ways = tuple(int(link) for link in links[0] if link >= 0)
        return Route(float(latency[0]), ways, float(rates[0]))

    def max_rates(self, links: Numbers, nbytes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the largest rate of each message if no other message uses its links.

        Args:
            links: Links of each message, as `routes` returns them.
            nbytes: Size of each message.
        """
        limits = np.full(len(nbytes), np.inf)
        for number, level in enumerate(self.levels):
            if level.by_size:
                passes = links[:, 2 * number] >= 0
                limits[passes] = np.minimum(limits[passes], level.max_rates(nbytes[passes]))
        return limits

    def routes(self, sources: Numbers, targets: Numbers) -> tuple[npt.NDArray[np.float64], Numbers]:
        """Return latencies and links for several messages, as arrays.

        Args:
            sources: Sending rank of each message.
            targets: Receiving rank of each message.

        Returns:
            Latency of each message in seconds, and one row of links for each, padded with -1.

        Raises:
            ConfigError: The cluster has no such rank.
        """
        if len(sources):
            self.check_size(1 + int(max(sources.max(), targets.max())))
            if min(sources.min(), targets.min()) < 0:
                msg = (
                    "ranks of a cluster are numbered from 0, got "
                    f"{int(min(sources.min(), targets.min()))}"
                )
                raise ConfigError(msg)
        latency = np.zeros(len(sources))
        links = np.full((len(sources), 2 * len(self.levels)), -1, dtype=np.int64)
        apart = sources != targets
        for number, level in enumerate(self.levels):
            width, first = self._widths[number], self._first_links[number]
            up, down = sources // width, targets // width
            links[apart, 2 * number] = first + 2 * up[apart]
            links[apart, 2 * number + 1] = first + 2 * down[apart] + level.full_duplex
            wider = self._widths[number + 1]
            meets = apart & (sources // wider == targets // wider)
            latency[meets] = level.latency_s
            apart &= ~meets
        return latency, links

    def level_of_link(self, link: int) -> Level:
        """Return the level that a link leads to."""
        return self.levels[int(np.searchsorted(self._first_links, link, side="right")) - 1]


def flat(num_ranks: int, latency_s: float, bytes_per_s: float) -> Cluster:
    """Return a cluster in which one switch connects all ranks by full-duplex links.

    Args:
        num_ranks: World size.
        latency_s: Seconds per message, besides its bytes.
        bytes_per_s: Bandwidth of each link.
    """
    level = Level(name="switch", size=num_ranks, latency_s=latency_s, bytes_per_s=bytes_per_s)
    return Cluster([level])
