"""Chooses nodes of a Ray cluster for ranks, by the resources that are free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from braid.errors import ConfigError

__all__ = ["STRATEGIES", "RayNode", "free_nodes", "place"]

STRATEGIES = ("pack", "spread")


class RayNode(NamedTuple):
    """A node of a Ray cluster, with its free resources.

    Attributes:
        key: Identifier of the node.
        name: Name of its host.
        free: Unused resources.
    """

    key: str
    name: str
    free: Mapping[str, float]

    def fits(self, resources: Mapping[str, float]) -> int:
        """Return the number of ranks for which the node has enough free resources."""
        counts = [
            int(self.free.get(name, 0.0) / want + 1e-9) for name, want in resources.items() if want
        ]
        return min(counts, default=0)


def free_nodes(ray: Any) -> list[RayNode]:
    """Return the nodes that Ray keeps, with their free resources."""
    free = ray._private.state.available_resources_per_node()  # noqa: SLF001 - nothing public
    draining = ray._private.state.state.get_draining_nodes()  # noqa: SLF001
    kept = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in draining]
    names = [node["NodeManagerHostname"] for node in kept]
    return [
        RayNode(
            node["NodeID"],
            name if names.count(name) == 1 else f"{name}-{node['NodeID'][:4]}",
            free.get(node["NodeID"], {}),
        )
        for node, name in zip(kept, names, strict=True)
    ]


def place(
    nodes: Sequence[RayNode],
    num_ranks: int,
    resources: Mapping[str, float],
    strategy: str = "pack",
    max_ranks: int = 0,
) -> list[tuple[RayNode, int]]:
    """Choose the nodes of a job, with the number of ranks of each.

    Args:
        nodes: Nodes of the cluster.
        num_ranks: Number of ranks; 0 for the largest number that fits, up to `max_ranks`.
        resources: Resources of a rank.
        strategy: `pack` to use the fewest nodes, `spread` to use the most nodes.
        max_ranks: Largest number of ranks if `num_ranks` is 0; 0 for no limit.

    Raises:
        ConfigError: The free resources do not suffice; the message lists them.

    >>> a, b = RayNode("1", "a", {"CPU": 4}), RayNode("2", "b", {"CPU": 2})
    >>> [(node.name, count) for node, count in place([b, a], 5, {"CPU": 1})]
    [('a', 4), ('b', 1)]
    """
    room = sorted(
        ((n.fits(resources), n) for n in nodes), key=lambda pair: (-pair[0], pair[1].name)
    )
    total = sum(count for count, _ in room)
    wanted = num_ranks or min(total, max_ranks or total)
    if not wanted or wanted > total:
        asked = " ".join(f"{name}={want:g}" for name, want in resources.items())
        free = "; ".join(
            f"{n.name} " + (" ".join(f"{k}={n.free.get(k, 0.0):g}" for k in resources) or "nothing")
            for _, n in room
        )
        msg = (
            f"Ray has resources for {total} ranks of {asked}, but the job needs "
            f"{num_ranks or 'at least one'}: free are {free or 'no nodes'}. Lower -n or "
            "--resources, or wait"
        )
        raise ConfigError(msg)
    counts = [0] * len(room)
    while sum(counts) < wanted:
        for index, (most, _) in enumerate(room):
            more = min(most - counts[index], wanted - sum(counts))
            counts[index] += min(more, 1) if strategy == "spread" else more
    return [(node, count) for count, (_, node) in zip(counts, room, strict=True) if count]
