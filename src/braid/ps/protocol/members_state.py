"""Nodes that have joined a run, and barriers at which they wait: the part of both schedulers.

tables             `scheduler_state`: a policy says how the run goes on without a lost node
keys and values    `kv/protocol/members_state`: lost nodes are named, and nobody replaces them
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from braid.ps.protocol.directory import Directory, server_node, worker_node

__all__ = ["MembersState", "PublishDirectory", "ReleaseNodes"]

BarrierName = TypeVar("BarrierName")
BarrierRequest = TypeVar("BarrierRequest")


class PublishDirectory(NamedTuple):
    """Send the directory to all nodes."""

    directory: Directory


class ReleaseNodes(NamedTuple):
    """Answer requests: the barrier is reached, or the node may go."""

    requests: tuple[Any, ...]


class MembersState(Generic[BarrierName, BarrierRequest]):
    """Nodes and barriers of a scheduler.

    Args:
        num_servers: Number of servers for which the first directory waits.
        num_workers: Number of workers for which it waits.
        directory: The last directory of an earlier life.

    Attributes:
        directory: The directory; None until all nodes have joined.
        addresses: Addresses of servers and workers that have joined; empty for one without.
    """

    def __init__(
        self, num_servers: int, num_workers: int, directory: Directory | None = None
    ) -> None:
        self._num_servers, self._num_workers = num_servers, num_workers
        self.directory = directory
        self.addresses: dict[str, str] = {}
        self._arrived: dict[BarrierName, dict[str, BarrierRequest]] = {}
        self._expected: dict[BarrierName, frozenset[str]] = {}  # of each barrier

    @property
    def absent(self) -> list[str]:
        """Servers and workers that have not joined."""
        nodes = [server_node(number) for number in range(self._num_servers)]
        nodes += [worker_node(number) for number in range(self._num_workers)]
        return [node for node in nodes if node not in self.addresses]

    def _arrive(
        self, name: BarrierName, node: str, request: BarrierRequest, members: frozenset[str]
    ) -> None:
        """Hold a node at a barrier until all members have come."""
        self._arrived.setdefault(name, {})[node] = request
        self._expected[name] = members & self._expected.get(name, members)

    def _close(self, name: BarrierName) -> dict[str, BarrierRequest]:
        """End a barrier; return the nodes that wait there, with their requests."""
        del self._expected[name]
        return self._arrived.pop(name)

    @property
    def _reached(self) -> list[BarrierName]:
        """Barriers to which all expected nodes have come."""
        return [name for name in self._arrived if not self._lacks(name)]

    def _lacks(self, name: BarrierName) -> frozenset[str]:
        """Return the nodes that have not come to a barrier."""
        return self._expected[name] - self._arrived[name].keys()
