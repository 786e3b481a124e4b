"""Costs of machines from a cluster description: links by levels, and a device.

Ranks of one axis of a mesh form rings. A ring that leaves a unit, such as a host, shares the unit's
link with the rings of its neighbours:

    hosts of 4 ranks, tp=2,dp=4       dp ring 0   0  2 | 4  6     2 rings over a host's link
                                      dp ring 1   1  3 | 5  7
                                      tp rings    0-1 2-3 4-5 6-7      none

Collectives use rings, or halving and doubling if faster (`cost.forms`). Messages go along a row of
ranks, all at the same time; the slowest hop determines the time. A parameter server is an
all-to-all: every rank has a server, and each rank sends to the servers of all ranks.

Source: R. Thakur et al., IJHPCA 19 (2005); D. Narayanan et al., SC 2021, section 3 (axes of meshes
and levels of clusters).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np

from braid.plan.costs import Axis, Origin
from braid.programs.cost import Cost, form
from braid.programs.topology import DTYPES, Cluster, Device, Level

__all__ = ["DescribedMachines"]

ALGORITHMS = {
    "all_reduce": ("ring", "halving_doubling"),
    "all_gather": ("ring", "bruck"),
    "reduce_scatter": ("ring",),
    "all_to_all": ("pairwise",),
}
TOUCHES = 7  # reads and writes of each parameter by Adam: gradient, parameter, two states


class DescribedMachines:
    """Costs of computation and communication on the ranks of a described cluster.

    Args:
        cluster: Cluster with its levels of links.
        device: Device of each rank.
        num_ranks: Number of ranks to use, beginning with rank 0; all ranks of the cluster if None.
        memory_bytes: Memory of a rank, if it differs from the device's.
        dtype: Dtype of parameters.
    """

    origin: Origin = "estimated"
    knows_servers = True
    ranks_per_core = 1.0

    def __init__(
        self,
        cluster: Cluster,
        device: Device,
        *,
        num_ranks: int | None = None,
        memory_bytes: float | None = None,
        dtype: str = "fp32",
    ) -> None:
        self.num_ranks = cluster.num_ranks if num_ranks is None else num_ranks
        cluster.check_size(self.num_ranks)
        self.memory_bytes = device.memory_bytes if memory_bytes is None else memory_bytes
        self.overlap = device.overlap
        self.action_s = 0.0
        self.step_s = device.efficiency.step_s
        self.cluster, self.device = cluster, device
        # states of the optimizer are of float32, whatever the parameters are of
        self._state_scale = DTYPES["fp32"] / DTYPES[dtype]
        self._crossed = cache(self._crossed_by)

    def collective_s(self, operation: str, axis: Axis, nbytes: float) -> float:
        """Return the seconds of a collective; see `Machines.collective_s`."""
        if axis.size == 1:
            return 0.0
        if operation == "push_pull":
            return self._push_pull_s(axis, nbytes)
        costs = (form(name, operation, axis.size, nbytes) for name in ALGORITHMS[operation])
        return min(self._seconds(cost, axis) for cost in costs)

    def message_s(self, axis: Axis, nbytes: float) -> float:
        """Return the seconds of a message to the next rank of an axis; see `Machines.message_s`."""
        if axis.size == 1:
            return 0.0
        return self.device.efficiency.transfer_s + self._seconds(Cost(1, nbytes), axis, 0.0)

    def optimizer_s(self, param_bytes: float) -> float:
        """Return the seconds of clipping and the optimizer's step; see `Machines.optimizer_s`."""
        moved = TOUCHES * param_bytes * self._state_scale
        return moved / (self.device.bytes_per_s * self.device.efficiency.memory)

    def level_bytes(self, axis: Axis, sent: float) -> Mapping[str, float]:
        """Return the bytes on one link of each cluster level; see `Machines.level_bytes`."""
        return {level.name: rows * sent for level, rows in self._crossed(axis)}

    def _seconds(self, cost: Cost, axis: Axis, message_s: float | None = None) -> float:
        """Return the seconds of messages along an axis, sent by all rows at the same time."""
        share, own_s = self.device.efficiency.link, self.device.efficiency.message_s
        crossed = self._crossed(axis)
        size = np.array([cost.nbytes / cost.messages])
        per_byte = max(
            max(rows * _ways(level) / level.bytes_per_s, 1 / float(level.max_rates(size)[0]))
            for level, rows in crossed
        )
        a = crossed[-1][0].latency_s + (own_s if message_s is None else message_s)
        return cost.seconds(a, per_byte / share)

    def _push_pull_s(self, axis: Axis, nbytes: float) -> float:
        """Return the seconds in which ranks push to all servers, these step, and ranks pull."""
        share, slowest_s, width = self.device.efficiency.link, 0.0, 1
        for level in self.cluster.levels:
            inside = max(1, min(axis.size, width // axis.stride))  # ranks of a row in a child
            rows = max(1, min(axis.stride, width))
            sent = rows * inside * nbytes * (axis.size - inside) / axis.size
            slowest_s = max(slowest_s, sent * _ways(level) / (level.bytes_per_s * share))
            width *= level.size
        a = self._crossed(axis)[-1][0].latency_s + self.device.efficiency.message_s
        return 2 * (2 * a + slowest_s) + self.optimizer_s(nbytes / axis.size)

    def _crossed_by(self, axis: Axis) -> tuple[tuple[Level, int], ...]:
        """Return the levels that rows of ranks cross, and the most rows over a link of each."""
        if axis.size == 1:
            return ()
        return tuple(self._rows_over_links(axis))

    def _rows_over_links(self, axis: Axis) -> Iterator[tuple[Level, int]]:
        ranks = np.arange(self.num_ranks // (axis.size * axis.stride) * axis.size * axis.stride)
        row_of = ranks // (axis.size * axis.stride) * axis.stride + ranks % axis.stride
        width = 1
        for level in self.cluster.levels:
            pairs = np.unique(np.stack([row_of, ranks // width]), axis=1)  # rows, children
            leaves = np.bincount(pairs[0])[pairs[0]] > 1
            if leaves.any():
                yield level, int(np.bincount(pairs[1][leaves]).max())
            width *= level.size


def _ways(level: Level) -> int:
    """Return how many directions share the bandwidth of a link."""
    return 1 if level.full_duplex else 2
