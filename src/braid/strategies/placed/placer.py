"""Chooses a device for each node of a graph.

    constraint     the devices that match the name given to the node
    colocation     nodes that must have one device: they share a parameter, or one writes in place
                   to a tensor of the other; a group has the devices that all its nodes may have
    cost           for a group with several devices: seconds of the values that would cross, and
                   seconds by which the device would exceed an equal share of the work

Groups choose in the order of the graph. So a model without constraints is cut into parts of equal
work, as in a pipeline.

Source: M. Abadi et al., "TensorFlow: Large-Scale Machine Learning on Heterogeneous Distributed
Systems", 2015, section 3.2.1; the greedy cost here looks at bytes and work, not at a simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import networkx as nx

from braid.errors import raise_all
from braid.strategies.placed.spec import DeviceSpec

__all__ = ["Colocation", "PlacerNode", "choose_devices"]

BYTES_PER_S = 2e9  # of a value that crosses
MESSAGE_S = 2e-4  # of one more value that crosses
FLOPS = 2e10  # floating point operations that a device executes in a second


class PlacerNode(NamedTuple):
    """A node as the placer sees it.

    Attributes:
        name: Name of the node.
        where: Line of the model.
        spec: Device that the user names for the node, completely or in part.
        flops: Number of floating-point operations.
        sources: For each node that this node gets values from, the bytes of these values.
    """

    name: str
    where: str
    spec: DeviceSpec = DeviceSpec()
    flops: float = 0.0
    sources: Mapping[int, int] = {}

    def __str__(self) -> str:
        return f"{self.name} ({self.where})" if self.where else self.name


class Colocation(NamedTuple):
    """Two nodes that must be on the same device, and the reason."""

    first: int
    second: int
    reason: str


def choose_devices(
    nodes: Sequence[PlacerNode], colocations: Sequence[Colocation], devices: Sequence[DeviceSpec]
) -> list[DeviceSpec]:
    """Return a device for each node.

    Args:
        nodes: Nodes in the order of the graph.
        colocations: Pairs of nodes that must have one device.
        devices: Devices of the cluster; the first ones are preferred.

    Raises:
        ConfigError: A node names a device that does not exist, or nodes that must have one device
            name different ones; the message has all of them.
    """
    matching = [[device for device in devices if node.spec.matches(device)] for node in nodes]
    raise_all(
        f"{node} is placed on {node.spec}, which does not exist: the cluster has "
        f"{', '.join(map(str, devices))}"
        for node, candidates in zip(nodes, matching, strict=True)
        if not candidates
    )
    together = nx.Graph()
    together.add_nodes_from(range(len(nodes)))
    for first, second, reason in colocations:
        together.add_edge(first, second, reason=reason)
    groups = sorted(map(sorted, nx.connected_components(together)))
    candidates: list[list[DeviceSpec]] = []
    problems: list[str] = []
    for group in groups:
        common = [device for device in devices if all(device in matching[node] for node in group)]
        candidates.append(common)
        if not common:
            problems.append(_conflict(nodes, matching, group, together))
    raise_all(problems)
    return _by_cost(nodes, groups, candidates, len(devices))


def _conflict(
    nodes: Sequence[PlacerNode],
    matching: Sequence[Sequence[DeviceSpec]],
    group: Sequence[int],
    together: nx.Graph,
) -> str:
    """Return a text about two nodes of a group that name different devices."""
    pairs = [pair for pair in combinations(group, 2) if not _common(matching, pair)]
    pair = min(
        pairs or [(group[0], group[-1])],
        key=lambda pair: nx.shortest_path_length(together, *pair),
    )
    path = nx.shortest_path(together, *pair)
    reasons = [together.edges[edge]["reason"] for edge in pairwise(path)]
    first, second = (nodes[i] for i in pair)
    return (
        f"{first} is placed on {first.spec} and {second} on {second.spec}, but they must have "
        f"one device: {'; '.join(dict.fromkeys(reasons))}. Give both the same device"
    )


def _common(matching: Sequence[Sequence[DeviceSpec]], pair: tuple[int, int]) -> list[DeviceSpec]:
    return [device for device in matching[pair[0]] if device in matching[pair[1]]]


def _by_cost(
    nodes: Sequence[PlacerNode],
    groups: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[DeviceSpec]],
    num_devices: int,
) -> list[DeviceSpec]:
    """Return a device for each node: the only one of its group, or the one of least cost."""
    chosen: dict[int, DeviceSpec] = {}
    work: dict[DeviceSpec, float] = {}
    users: dict[int, dict[int, int]] = {}
    for number, node in enumerate(nodes):
        for source, nbytes in node.sources.items():
            users.setdefault(source, {})[number] = nbytes
    flops = [sum(nodes[i].flops for i in group) for group in groups]
    share = sum(flops) / num_devices

    def choose(index: int, device: DeviceSpec) -> None:
        work[device] = work.get(device, 0.0) + flops[index]
        chosen.update(dict.fromkeys(groups[index], device))

    def cost(index: int, device: DeviceSpec) -> float:
        neighbours: dict[int, int] = {}
        for i in groups[index]:
            neighbours |= {**nodes[i].sources, **users.get(i, {})}
        crossing = [nbytes for i, nbytes in neighbours.items() if chosen.get(i, device) != device]
        # half of a group may lie beyond the share, so that shares are equal on average
        excess = max(0.0, work.get(device, 0.0) + flops[index] / 2 - share)
        return sum(MESSAGE_S + nbytes / BYTES_PER_S for nbytes in crossing) + excess / FLOPS

    for index, devices in enumerate(candidates):
        if len(devices) == 1:
            choose(index, devices[0])
    for index, devices in enumerate(candidates):
        if len(devices) > 1:
            choose(index, min(devices, key=lambda device: cost(index, device)))
    return [chosen[number] for number in range(len(nodes))]
