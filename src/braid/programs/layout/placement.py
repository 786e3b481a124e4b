"""Order of the axes of a mesh over the ranks of a cluster: most bytes on the quickest links.

Ranks are numbered host by host, so the order of axes decides which ranks share a host:

    hosts of 4 ranks            host 0          host 1
    dp=2,tp=4   tp last       0  1  2  3  |   4  5  6  7       tp: 0 1 2 3 | 4 5 6 7
                                                               dp: 0 4 | 1 5 | 2 6 | 3 7
    tp=4,dp=2   dp last                                        tp: 0 2 4 6 | 1 3 5 7
                                                               dp: 0 1 | 2 3 | 4 5 | 6 7

The first order sends gradients between hosts, once a step, the second one activations, in each
layer. Every order is computed, so the one returned is the best by this prediction:

    collectives along an axis are rings, one for each level of the cluster, as in an all-reduce by
    hosts; all groups of an axis send at the same time, and share links; a round takes as long as
    its slowest message; axes take turns, and nothing overlaps

              host 0    host 1                           1. reduce_scatter on each host: l bytes
    group     0 1 2 3 | 8 9 10 11     of 2 levels        2. all_reduce between hosts: l/4 bytes
                                                         3. all_gather on each host: l bytes

A group that is not divided evenly over hosts is one ring. An all-to-all goes in rounds, to each
further neighbour in turn. The seconds of an axis depend only on its size and its stride, which is
the number of ranks from one index to the next.

Source of the rule for tensor parallelism inside a host: D. Narayanan et al., Efficient large-scale
language model training on GPU clusters, SC 2021, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations
from operator import mul

import numpy as np
import numpy.typing as npt

from braid.errors import ConfigError
from braid.programs.cost import form, messages_s
from braid.programs.layout.mesh import Mesh
from braid.programs.layout.traffic import Traffic, traffic_of
from braid.programs.topology import Cluster

__all__ = ["PlacedAxis", "place"]

MOST_AXES = 7  # of several ranks, which have 5,040 orders
SAME = 1e-9  # relative difference of sums of floats in another order
HOST = "host"
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlacedAxis:
    """Cost of one mesh axis in one order of the axes, with the cluster levels that it crosses.

    Attributes:
        traffic: Collectives along the axis in a step.
        stride: Number of ranks from one index to the next.
        spread: For each cluster level that divides a group: the largest number of children of one
            unit that have ranks of the same group.
        seconds: Predicted seconds of a step's collectives.
    """

    traffic: Traffic
    stride: int
    spread: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One order of the mesh axes, with its cost.

    Attributes:
        mesh: The axes in this order, the last one on neighbouring ranks.
        axes: Cost of each axis.
    """

    mesh: Mesh
    axes: Mapping[str, PlacedAxis]

    @property
    def seconds(self) -> float:
        """Predicted seconds of all collectives of a step, without overlap."""
        return math.fsum(cost.seconds for cost in self.axes.values())


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """Best order of mesh axes on a cluster, and the worst order for comparison.

    Attributes:
        cluster: Connections of the ranks.
        best: Order with the least predicted seconds.
        worst: Order with the most predicted seconds.
    """

    cluster: Cluster
    best: Arrangement
    worst: Arrangement

    @property
    def mesh(self) -> Mesh:
        """Mesh with its axes in the best order, for `braid.mesh(str(placement.mesh))`."""
        return self.best.mesh

    @property
    def order(self) -> str:
        """Best order in Megatron's notation, such as `tp-dp-pp`: the fastest-varying axis first."""
        return "-".join(reversed(list(self.mesh.axes)))

    @property
    def seconds(self) -> float:
        """Predicted seconds of all collectives of a step."""
        return self.best.seconds

    def crossing(self, level: str | None = None) -> tuple[str, ...]:
        """Return the axes with groups that span several units of a level, such as several hosts.

        Args:
            level: Name of the level; by default `host`, or the lowest level if there is no `host`.

        Raises:
            ConfigError: The cluster has no such level.
        """
        names = [known.name for known in self.cluster.levels]
        name = level or (HOST if HOST in names else names[0])
        above = names[self.cluster.level_number(name) + 1 :]
        axes = self.best.axes.items()
        return tuple(axis for axis, cost in axes if any(unit in cost.spread for unit in above))

    def __str__(self) -> str:
        """Return a table of both orders, axis by axis."""
        rows = [("axis", "collectives of a step", "best over", "ms", "worst over", "ms")]
        for axis, cost in reversed(list(self.best.axes.items())):
            other = self.worst.axes[axis]
            rows.append((axis, str(cost.traffic), *_cells(cost), *_cells(other)))
        rows.append(("all", "", "", _ms(self.best.seconds), "", _ms(self.worst.seconds)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        crossing = ", ".join(self.crossing()) or "none"
        head = [
            f"{self.mesh.size} ranks on {self.cluster}",
            f"best   {self.best.mesh}   axes between hosts: {crossing}",
            f"worst  {self.worst.mesh}",
        ]
        return "\n".join([*head, *(_line(row, widths) for row in rows)])


def place(
    mesh: Mesh, cluster: Cluster, traffic: Mapping[str, float | Traffic] | None = None
) -> MeshPlacement:
    """Order the axes of a mesh so that a step's collectives take the least time on a cluster.

    Among orders of equal time, axes with more bytes get closer ranks; after that, the order of the
    mesh decides. An axis that does not fit into a host is divided over hosts, with as large a part
    as possible on each host.

    Args:
        mesh: Axes, in any order.
        cluster: Connections of the ranks, as `braid probe` writes them; may have more ranks.
        traffic: Bytes per step, or `Traffic`, by axis; None or a missing axis for `usual_traffic`.

    Raises:
        ConfigError: The cluster is too small, there are too many axes, or traffic is unknown.

    >>> from braid.programs.topology import Level
    >>> levels = [Level(name="host", size=4, latency_s=1e-6, bytes_per_s=100e9),
    ...           Level(name="rack", size=2, latency_s=5e-6, bytes_per_s=10e9)]
    >>> placement = place(Mesh.parse("tp=4,dp=2"), Cluster(levels))
    >>> str(placement.mesh), placement.order, placement.crossing()
    ('dp=2,tp=4', 'tp-dp', ('dp',))
    """
    cluster.check_size(mesh.size)
    flows = traffic_of(mesh, traffic)
    wide = [axis for axis, size in reversed(list(mesh.axes.items())) if size > 1]
    if len(wide) > MOST_AXES:
        msg = (
            f"{mesh} has {len(wide)} axes of several ranks, but at most {MOST_AXES} can be "
            "placed on a cluster: join some of them"
        )
        raise ConfigError(msg)
    # the first order of equal ones is taken: more bytes, closer ranks
    wide.sort(key=lambda axis: -flows[axis].step_bytes)
    seconds: dict[tuple[str, int], float] = {}
    best, worst = (math.inf, tuple(wide)), (-math.inf, tuple(wide))
    for order in permutations(wide):
        for axis, stride in _strides(mesh, order):
            if (axis, stride) not in seconds:
                of_axis = (mesh.axes[axis], stride, flows[axis])
                seconds[axis, stride] = _seconds(cluster, mesh.size, *of_axis)
        total = math.fsum(seconds[key] for key in _strides(mesh, order))
        if total < best[0] * (1 - SAME):
            best = (total, order)
        if total > worst[0] * (1 + SAME) or worst[0] < 0:
            worst = (total, order)

    def arrangement(order: Sequence[str]) -> Arrangement:
        narrow = [axis for axis in mesh.axes if axis not in order]
        outward = [*narrow, *reversed(order)]
        costs = {axis: PlacedAxis(flows[axis], 1, {}, 0.0) for axis in outward}
        for axis, stride in _strides(mesh, order):
            spread = _spread(cluster, mesh.size, mesh.axes[axis], stride)
            costs[axis] = PlacedAxis(flows[axis], stride, spread, seconds[axis, stride])
        return Arrangement(Mesh({axis: mesh.axes[axis] for axis in outward}), costs)

    return MeshPlacement(cluster, arrangement(best[1]), arrangement(worst[1]))


def _strides(mesh: Mesh, order: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the stride of each axis, from the one on neighbouring ranks."""
    strides = accumulate((mesh.axes[axis] for axis in order), mul, initial=1)
    return zip(order, strides, strict=False)


def _seconds(cluster: Cluster, num_ranks: int, size: int, stride: int, flow: Traffic) -> float:
    """Return the seconds of a step's collectives of all groups of an axis."""
    ranks = np.arange(_enough(cluster, num_ranks, size * stride))

    def slowest(size: int, stride: int, shift: int, nbytes: float) -> float:
        index = ranks // stride % size
        targets = ranks + ((index + shift) % size - index) * stride
        return float(messages_s(cluster, ranks, targets, nbytes).max())

    if flow.operation == "send":
        ends = ranks // stride % size == size - 1  # the last index has no next one
        sent = messages_s(cluster, ranks[~ends], ranks[~ends] + stride, flow.nbytes)
        return flow.count * float(sent.max())
    if flow.operation == "all_to_all":
        share = flow.nbytes / size
        return flow.count * math.fsum(slowest(size, stride, i, share) for i in range(1, size))
    total, nbytes = 0.0, flow.nbytes
    for part, step in _levels(cluster, num_ranks, size, stride):
        cost = form("ring", flow.operation, part, nbytes)
        total += cost.messages * slowest(part, step, 1, cost.nbytes / cost.messages)
        nbytes /= part
    return flow.count * total


def _levels(cluster: Cluster, num_ranks: int, size: int, stride: int) -> list[tuple[int, int]]:
    """Return the rings of a group, from the lowest level: number of ranks, and their stride.

    Groups that are not divided evenly over the units of a level are one ring.
    """
    rings = []
    below, block = stride, size * stride
    for width in accumulate((level.size for level in cluster.levels), mul):
        upper = min(width, block)
        if upper > below:
            cuts_groups = block % upper or (width > block and width % block and num_ranks > width)
            if upper % below or cuts_groups:
                return [(size, stride)]
            rings.append((upper // below, below))
            below = upper
    return rings


def _enough(cluster: Cluster, num_ranks: int, block: int) -> int:
    """Return a sufficient number of ranks to find the slowest message: a unit with whole groups."""
    widths = accumulate((level.size for level in cluster.levels), mul)
    return min(num_ranks, next((width for width in widths if width % block == 0), num_ranks))


def _spread(cluster: Cluster, num_ranks: int, size: int, stride: int) -> dict[str, int]:
    """Return among how many children of a unit a group is divided at most, by level."""
    ranks = np.arange(_enough(cluster, num_ranks, size * stride))
    groups = ranks // (size * stride) * stride + ranks % stride
    widths = accumulate((level.size for level in cluster.levels), mul, initial=1)
    spread = {}
    for level, (below, width) in zip(cluster.levels, pairwise(widths), strict=True):
        children: Numbers = np.unique(np.stack([groups, ranks // below]), axis=1)
        units = np.stack([children[0], children[1] * below // width])
        most = int(np.unique(units, axis=1, return_counts=True)[1].max())
        if most > 1:
            spread[level.name] = most
    return spread


def _cells(cost: PlacedAxis) -> tuple[str, str]:
    spread = " x ".join(f"{count} ({level})" for level, count in cost.spread.items())
    return spread or "-", _ms(cost.seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        f"{cell:>{width}}" if column in {3, 5} else f"{cell:{width}}"
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()
