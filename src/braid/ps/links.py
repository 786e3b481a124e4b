"""The links of a node to other nodes, which are connected when they are needed.

    send ──> connect ──> broken? tried again after AGAIN_S, unless the node has left the directory

A worker does not listen, so it reconnects itself. A server or the scheduler may be back at the same
address, for example as a new process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from braid.errors import CommError, RendezvousError
from braid.ps.protocol.directory import SCHEDULER
from braid.runtime.message import PeerLost, Van

__all__ = ["NodeLinks"]

AGAIN_S = 1.0  # pause before a broken link is tried again: a dead node has left the directory then
CONNECT_S = 1.0  # timeout of one connection attempt


class NodeLinks:
    """Links of a node to other nodes; some may be broken.

    Args:
        van: Connections of the node to other nodes.
        address_of: Returns the address of a node; None for a node without a known address.

    Attributes:
        losses: Last loss of each node.
        broken: Nodes with a broken link, and when to try each one again.
    """

    def __init__(self, van: Van, address_of: Callable[[str], str | None]) -> None:
        self._van = van
        self._address_of = address_of
        self.losses: dict[str, PeerLost] = {}
        self.broken: dict[str, int] = {}
        self._refused: set[str] = set()  # nodes at whose address no process listens

    def works(self, node: str) -> bool:
        """Return whether the link to a node works, as far as this node knows."""
        return node not in self.broken

    @property
    def is_left_behind(self) -> bool:
        """Whether all links are broken, and no process listens at the other nodes' addresses."""
        return SCHEDULER in self._refused and self._refused >= {*self.broken, *self._van.peers}

    def open(self, node: str, address: str, timeout_s: float | None = None) -> None:
        """Connect to a node.

        Raises:
            CommError: The link breaks.
            RendezvousError: The node cannot be reached.
        """
        self._van.connect(node, address, timeout_s=timeout_s)
        self.broken.pop(node, None)
        self._refused.discard(node)

    def connect(self, node: str) -> bool:
        """Connect to a node without a link; return False if that fails or has just failed."""
        return self.works(node) and self._try(node)

    def note_broken(self, node: str) -> None:
        """Record that the link to a node is broken."""
        self.broken[node] = self._van.clock.after_ns(AGAIN_S)

    def drop(self, node: str) -> None:
        """Stop reconnecting to a node whose link is broken."""
        self.broken.pop(node, None)

    def restore(self, now_ns: int) -> Iterator[str]:
        """Try the broken links that are due; yield the nodes that are connected again."""
        for node in [node for node, due_ns in self.broken.items() if due_ns <= now_ns]:
            if self._van.is_connected(node) or self._try(node):
                self.broken.pop(node, None)
                yield node
            elif node.startswith("worker:") or (
                node.startswith("server:") and self._address_of(node) is None
            ):
                self.broken.pop(node, None)

    def _try(self, node: str) -> bool:
        address = self._address_of(node)
        if address is None:  # vans inside one process have an empty one
            return False
        try:
            self.open(node, address, CONNECT_S)
        except (CommError, RendezvousError) as exc:
            self.note_broken(node)
            if isinstance(exc.__cause__, ConnectionRefusedError | FileNotFoundError):
                self._refused.add(node)
            return False
        return True
