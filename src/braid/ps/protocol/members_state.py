"""Nodes that have joined a run, and their barriers: the common base of both schedulers.

tables             `scheduler_state`: a policy decides how the run continues after a loss
keys and values    `kv/protocol/members_state`: lost nodes are named, and not replaced
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from braid.ps.protocol.directory import Directory, server_node, worker_node

__all__ = ["MembersState", "PublishDirectory", "ReleaseNodes"]

BarrierName = TypeVar("BarrierName")
BarrierRequest = TypeVar("BarrierRequest")


class PublishDirectory(NamedTuple):
    """Instruction: send the directory (nodes, and servers of shards) to all nodes."""

    directory: Directory


class ReleaseNodes(NamedTuple):
    """Instruction: answer requests, since all members entered the barrier or a server may leave."""

    requests: tuple[Any, ...]


class MembersState(Generic[BarrierName, BarrierRequest]):
    """Nodes and barriers of a scheduler.

    Args:
        num_servers: Number of servers that must join before the first directory.
        num_workers: Number of workers that must join before the first directory.
        directory: Last directory of an earlier scheduler, from its journal.

    Attributes:
        directory: The directory; None until all nodes have joined.
        addresses: Addresses of servers and workers that have joined; empty for a node that does
            not listen.
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
        """Record that a node has entered a barrier of some members."""
        self._arrived.setdefault(name, {})[node] = request
        self._expected[name] = members & self._expected.get(name, members)

    def _close(self, name: BarrierName) -> dict[str, BarrierRequest]:
        """Remove a barrier; return the nodes in it, with their requests."""
        del self._expected[name]
        return self._arrived.pop(name)

    @property
    def _reached(self) -> list[BarrierName]:
        """Barriers that all expected nodes have entered."""
        return [name for name in self._arrived if not self._lacks(name)]

    def _lacks(self, name: BarrierName) -> frozenset[str]:
        """Return the expected nodes that have not entered a barrier."""
        return self._expected[name] - self._arrived[name].keys()
