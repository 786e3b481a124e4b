"""Machines from a cluster's description: links by levels, and a device of the table.

Ranks of one axis of a mesh form rings. A ring that leaves a unit, such as a host, shares the unit's
link with the rings of its neighbours:

    hosts of 4 ranks, tp=2,dp=4       dp ring 0   0  2 | 4  6     2 rings over a host's link
                                      dp ring 1   1  3 | 5  7
                                      tp rings    0-1 2-3 4-5 6-7      none

Collectives are those of rings, or by halving and doubling where these are faster (`cost.forms`).

Source: R. Thakur et al., IJHPCA 19 (2005); D. Narayanan et al., SC 2021, section 3 (axes of meshes
and levels of clusters).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from braid.cost import form
from braid.plan.costs import Axis, Origin
from braid.topology import DTYPES, Cluster, Device

__all__ = ["DescribedMachines"]

ALGORITHMS = {
    "all_reduce": ("ring", "halving_doubling"),
    "all_gather": ("ring", "bruck"),
    "reduce_scatter": ("ring",),
}
TOUCHES = 7  # reads and writes of each parameter by Adam: gradient, parameter, two states


class DescribedMachines:
    """Ranks of a cluster that is described.

    Args:
        cluster: Levels of links.
        device: Device of each rank.
        num_ranks: Number of ranks, the first ones of the cluster; all when None.
        memory_bytes: Memory of a rank in place of the device's.
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
        self._link = cache(self._link_of)

    def collective_s(self, operation: str, axis: Axis, nbytes: float) -> float:
        """See `Machines`."""
        if axis.size == 1:
            return 0.0
        a, b = self._link(axis)
        if operation == "push_pull":  # as many servers as workers, each with a share
            return 2 * (2 * a + nbytes * b)
        costs = (form(name, operation, axis.size, nbytes) for name in ALGORITHMS[operation])
        return min(cost.seconds(a, b) for cost in costs)

    def message_s(self, stride: int, nbytes: float) -> float:
        """See `Machines`."""
        a, b = self._link(Axis(2, stride))
        return a + self.device.efficiency.transfer_s + nbytes * b

    def optimizer_s(self, param_bytes: float) -> float:
        """See `Machines`."""
        moved = TOUCHES * param_bytes * self._state_scale
        return moved / (self.device.bytes_per_s * self.device.efficiency.memory)

    def level_bytes(self, axis: Axis, nbytes: float) -> Mapping[str, float]:
        """See `Machines`."""
        if axis.size == 1:
            return {}
        sent = 2 * (axis.size - 1) / axis.size * nbytes
        return {level: rings * sent for level, rings in self._crossed(axis).items()}

    def _link_of(self, axis: Axis) -> tuple[float, float]:
        """Return seconds of a message and of a byte between neighbours along an axis."""
        crossed = self._crossed(axis)
        levels = [level for level in self.cluster.levels if level.name in crossed]
        share = self.device.efficiency.link
        b = max(crossed[level.name] / (level.bytes_per_s * share) for level in levels)
        return levels[-1].latency_s + self.device.efficiency.message_s, b

    def _crossed(self, axis: Axis) -> dict[str, int]:
        """Return the rings over the link of a child, for each level that rings cross."""
        crossed, width = {}, 1
        for level in self.cluster.levels:
            if axis.size * axis.stride > width:
                crossed[level.name] = max(1, min(axis.stride, width))
            width *= level.size
        return crossed
