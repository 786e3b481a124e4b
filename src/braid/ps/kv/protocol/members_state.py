"""The scheduler's decisions: live nodes, lost nodes and barriers.

    event         result
    number        a number for a process without one; the same number if it asks again
    joins         PublishDirectory, once all nodes have joined, or when a lost node is back
    lost          PublishDirectory; barriers that wait for the node are refused, and name it
    enters        ReleaseNodes, once all members of the group have entered
    departs       barriers that wait for the node are refused

A new process in the place of a lost node is refused, since the keys of a lost server are gone.

Source: PS-Lite's Postoffice and the control messages of its Van.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, TypeVar

from braid.errors import CommError
from braid.ps.kv.groups import ALL, members_of
from braid.ps.protocol.directory import SCHEDULER, Directory
from braid.ps.protocol.members_state import MembersState, PublishDirectory, ReleaseNodes

__all__ = ["KVInstruction", "KVMembersState", "Refuse"]

Ticket = TypeVar("Ticket")


class Refuse(NamedTuple):
    """Instruction: send an error to these tickets, the addresses of waiting requests."""

    tickets: tuple[Any, ...]
    text: str


KVInstruction: TypeAlias = "PublishDirectory | ReleaseNodes | Refuse"


class KVMembersState(MembersState[tuple[int, int], Ticket]):
    """State of a key-value run's scheduler; a barrier's name is its customer and group.

    Args:
        num_servers: Number of servers of the run.
        num_workers: Number of workers of the run.

    Attributes:
        lost: Reason of the loss of each lost node.
        departed: Nodes that have finished.
    """

    def __init__(self, num_servers: int, num_workers: int) -> None:
        super().__init__(num_servers, num_workers)
        self._all = frozenset(members_of(ALL, num_servers, num_workers)) - {SCHEDULER}
        self._lives: dict[str, int] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self.lost: dict[str, str] = {}
        self.departed: set[str] = set()

    @property
    def is_over(self) -> bool:
        """Whether all nodes except the scheduler have finished or are lost."""
        return self._all <= self.departed | self.lost.keys()

    def number(self, candidate: str, role: str) -> int:
        """Return the number of a process in its role; assign one to a new process.

        Raises:
            CommError: All numbers of the role are assigned, or the role does not exist.
        """
        counts = {"server": self._num_servers, "worker": self._num_workers}
        if role not in counts:
            msg = f"unknown role {role!r}: a process must be a server or a worker"
            raise CommError(msg)
        asked = candidate, role
        if asked not in self._numbers:
            number = sum(other == role for _, other in self._numbers)
            if number >= counts[role]:
                msg = (
                    f"the run already has all its {counts[role]} {role}s: start no more, or "
                    f"raise the number of {role}s"
                )
                raise CommError(msg)
            self._numbers[asked] = number
        return self._numbers[asked]

    def joins(self, node: str, incarnation: int, address: str) -> list[KVInstruction]:
        """Add a node, or mark a lost one as alive again.

        Raises:
            CommError: The run has no such node, or another process is or was this node.
        """
        if node not in self._all:
            counts = f"{self._num_servers} servers, {self._num_workers} workers"
            msg = (
                f"{node} does not belong to the run, which has {counts}: start it with a smaller "
                "number"
            )
            raise CommError(msg)
        if self._lives.setdefault(node, incarnation) != incarnation:
            fate = f"was lost ({self.lost[node]})" if node in self.lost else "is here already"
            msg = f"{node} {fate}: another process cannot take its name"
            raise CommError(msg)
        is_known = node in self.addresses and node not in self.lost
        self.addresses[node] = address
        self.lost.pop(node, None)
        return [] if is_known else self._publish()

    def loses(self, node: str, reason: str) -> list[KVInstruction]:
        """Record the loss of a node; refuse the barriers that wait for it."""
        if node in self.departed or node not in self._lives or node in self.lost:
            return []
        self.lost[node] = reason
        return [*self._refuse_all(node), *self._publish()]

    def enters(self, node: str, customer: int, group: int, ticket: Ticket) -> list[KVInstruction]:
        """Add a node to a group's barrier, which is released once all members have entered.

        Raises:
            ConfigError: The group does not exist.
            CommError: The node is not a member of the group.
        """
        members = frozenset(members_of(group, self._num_servers, self._num_workers))
        if node not in members:
            msg = f"{node} is not a member of group {group} ({', '.join(sorted(members))})"
            raise CommError(msg)
        if members & (self.lost.keys() | self.departed):
            return [self._refuse(group, members, [ticket])]
        self._arrive((customer, group), node, ticket, members)
        return [ReleaseNodes(tuple(self._close(name).values())) for name in self._reached]

    def departs(self, node: str) -> list[KVInstruction]:
        """Record that a node has finished; refuse the barriers that wait for it."""
        self.departed.add(node)
        return self._refuse_all(node)

    def waiting(self) -> list[str]:
        """Return lines of text with the missing nodes of each barrier."""
        return [
            f"barrier of group {name[1]} lacks {', '.join(sorted(self._lacks(name)))}"
            for name in self._arrived
        ]

    def _refuse_all(self, node: str) -> list[KVInstruction]:
        """Refuse the barriers that wait for a node; a lost node gets no answer."""
        refusals: list[KVInstruction] = []
        for name, members in list(self._expected.items()):
            if node in members:
                arrived = self._close(name)
                tickets = [t for n, t in arrived.items() if n != node or n not in self.lost]
                refusals.append(self._refuse(name[1], members, tickets))
        return refusals

    def _refuse(self, group: int, members: frozenset[str], tickets: list[Ticket]) -> Refuse:
        reasons = [f"{node} is lost ({self.lost[node]})" for node in sorted(members & {*self.lost})]
        reasons += [f"{node} has left" for node in sorted(members & self.departed)]
        return Refuse(tuple(tickets), f"the barrier of group {group} cannot open: {reasons[0]}")

    def _publish(self) -> list[KVInstruction]:
        """Publish a directory without the addresses of lost nodes, once all nodes have joined."""
        if self.absent:
            return []
        alive = {node: self.addresses[node] for node in self.addresses if node not in self.lost}
        epoch = 0 if self.directory is None else self.directory.epoch + 1
        self.directory = Directory.of_nodes(epoch, alive, dict(self.lost))
        return [PublishDirectory(self.directory)]
