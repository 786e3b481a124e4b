"""The scheduler's decisions: who is here, who is lost, who waits at which barrier.

    event         what follows
    number        a number for a process that has none; the same again if it asks again
    joins         PublishMembers, when all are here; a node whose link was cut is here again
    lost          PublishMembers; barriers that wait for it are refused, and name it
    enters        ReleaseTickets of all when the last of the group comes
    departs       nobody waits for it any more

A new process in the place of a lost node is refused: the keys of a server went with it.

Source: PS-Lite's Postoffice and the control messages of its Van.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from braid.errors import CommError
from braid.ps.kv.groups import ALL, members_of
from braid.ps.roles import SCHEDULER

__all__ = ["MembersState", "PublishMembers", "Refuse", "ReleaseTickets"]

Ticket = TypeVar("Ticket")


class PublishMembers(NamedTuple):
    """Send the members to all nodes, or to those of them that ask."""

    nodes: tuple[str, ...]


class ReleaseTickets(NamedTuple):
    """Answer these requests."""

    tickets: tuple[Any, ...]


class Refuse(NamedTuple):
    """Refuse these requests."""

    tickets: tuple[Any, ...]
    text: str


Instruction: TypeAlias = "PublishMembers | ReleaseTickets | Refuse"


class MembersState(Generic[Ticket]):
    """State of a scheduler.

    Args:
        num_servers: Number of servers of the run.
        num_workers: Number of workers of the run.

    Attributes:
        addresses: Addresses of nodes that have joined.
        lost: Lost nodes, with the reason.
        departed: Nodes that are done.
    """

    def __init__(self, num_servers: int, num_workers: int) -> None:
        self._counts = {"server": num_servers, "worker": num_workers}
        self._all = frozenset(members_of(ALL, num_servers, num_workers))
        self._lives: dict[str, int] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._barriers: dict[tuple[int, int], dict[str, Ticket]] = {}
        self.addresses: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self.departed: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have joined."""
        return self._all - {SCHEDULER} <= self.addresses.keys()

    @property
    def is_over(self) -> bool:
        """Whether all nodes but the scheduler are done or lost."""
        return self._all - {SCHEDULER} <= self.departed | self.lost.keys()

    @property
    def missing(self) -> list[str]:
        """Nodes that have not joined."""
        return sorted(self._all - {SCHEDULER} - self.addresses.keys())

    def number(self, candidate: str, role: str) -> int:
        """Return the number of a process in its role.

        Raises:
            CommError: There are enough of this role already, or there is no such role.
        """
        if role not in self._counts:
            msg = f"there is no role {role!r}: processes are servers or workers"
            raise CommError(msg)
        asked = candidate, role
        if asked not in self._numbers:
            number = sum(each == role for _, each in self._numbers)
            if number >= self._counts[role]:
                msg = f"the run has {self._counts[role]} {role}s already, and this is one more"
                raise CommError(msg)
            self._numbers[asked] = number
        return self._numbers[asked]

    def joins(self, node: str, incarnation: int, address: str) -> list[Instruction]:
        """Take in a node.

        Raises:
            CommError: The run has no such node, or another process is or was this node.
        """
        if node not in self._all - {SCHEDULER}:
            counts = ", ".join(f"{count} {role}s" for role, count in self._counts.items())
            msg = f"the run has no {node}: it has {counts}"
            raise CommError(msg)
        if self._lives.setdefault(node, incarnation) != incarnation:
            fate = f"was lost ({self.lost[node]})" if node in self.lost else "is here already"
            msg = f"{node} {fate}: another process cannot be it"
            raise CommError(msg)
        self.addresses[node] = address
        if self.lost.pop(node, None) is not None:
            return [PublishMembers(tuple(self.addresses))]
        first = len(self.addresses) == len(self._all) - 1
        return (
            [PublishMembers(tuple(self.addresses) if first else (node,))]
            if self.is_complete
            else []
        )

    def loses(self, node: str, reason: str) -> list[Instruction]:
        """Record the loss of a node; barriers that wait for it are refused."""
        if node in self.departed or node not in self._lives or node in self.lost:
            return []
        self.lost[node] = reason
        done: list[Instruction] = []
        for (customer, group), waiting in list(self._barriers.items()):
            if node in self._members(group):
                del self._barriers[customer, group]
                waiting.pop(node, None)
                done.append(self._refuse(group, list(waiting.values())))
        return [*done, *([PublishMembers(tuple(self.addresses))] if self.is_complete else [])]

    def enters(self, node: str, customer: int, group: int, ticket: Ticket) -> list[Instruction]:
        """Let a node wait until all of a group have come to the barrier of a customer.

        Raises:
            ConfigError: There is no such group.
            CommError: The node is no member.
        """
        members = self._members(group)
        if node not in members:
            msg = f"{node} is no member of group {group} ({', '.join(sorted(members))})"
            raise CommError(msg)
        if members & (self.lost.keys() | self.departed):
            return [self._refuse(group, [ticket])]
        waiting = self._barriers.setdefault((customer, group), {})
        waiting[node] = ticket
        if not members <= waiting.keys():
            return []
        del self._barriers[customer, group]
        return [ReleaseTickets(tuple(waiting.values()))]

    def departs(self, node: str) -> list[Instruction]:
        """Record that a node is done."""
        self.departed.add(node)
        done: list[Instruction] = []
        for (customer, group), waiting in list(self._barriers.items()):
            if node in self._members(group):
                del self._barriers[customer, group]
                done.append(self._refuse(group, list(waiting.values())))
        return done

    def waiting(self) -> list[str]:
        """Return who is waited for at which barrier, as text."""
        return [
            f"barrier of group {group} lacks "
            f"{', '.join(sorted(self._members(group) - waiting.keys()))}"
            for (_, group), waiting in self._barriers.items()
        ]

    def _members(self, group: int) -> frozenset[str]:
        counts = self._counts
        return frozenset(members_of(group, counts["server"], counts["worker"]))

    def _refuse(self, group: int, tickets: list[Ticket]) -> Refuse:
        members = self._members(group)
        reasons = [f"{node} is lost ({self.lost[node]})" for node in sorted(members & {*self.lost})]
        reasons += [f"{node} has left" for node in sorted(members & self.departed)]
        return Refuse(tuple(tickets), f"the barrier of group {group} cannot open: {reasons[0]}")
