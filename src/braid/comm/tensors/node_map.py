"""Which members of a group are on one host, and which of several hosts work on the same part.

Members of one host are *local_peers*. They divide a tensor into *slices*, one for each of as many
local_peers as every host has; the members that work on one slice, one per host, are
*cross_node_peers*:

            host a         host b
    slice 0  member 0  ...  member 3      cross_node_peers
    slice 1  member 1  ...  member 4      cross_node_peers
            member 2                     no slice: host b has only two members
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["NodeMap"]


class NodeMap(NamedTuple):
    """Members by host.

    Attributes:
        hosts: Group ranks of each host's members, in order; hosts in the order of their first
            members.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> NodeMap:
        """From the number of each member's host."""
        members: dict[int, list[int]] = {}
        for member, number in enumerate(numbers):
            members.setdefault(number, []).append(member)
        return cls(tuple(tuple(found) for found in members.values()))

    @property
    def fewest(self) -> int:
        """Members of the smallest host."""
        return min(map(len, self.hosts))

    @property
    def most(self) -> int:
        """Members of the largest host."""
        return max(map(len, self.hosts))

    @property
    def num_slices(self) -> int:
        """Members of every host that have a slice."""
        return self.fewest

    def local_peers(self, member: int) -> tuple[int, ...]:
        """Members of the host of `member`, it included."""
        return next(host for host in self.hosts if member in host)

    def slice(self, member: int) -> int:
        """The slice that `member` works on; -1 for none."""
        index = self.local_peers(member).index(member)
        return index if index < self.num_slices else -1

    def cross_node_peers(self, member: int) -> tuple[int, ...]:
        """Members that work on the same slice, in the order of hosts, it included; itself alone without one."""
        index = self.slice(member)
        return (member,) if index < 0 else tuple(host[index] for host in self.hosts)

    def relay(self, member: int, other: int) -> int:
        """The relay of `member` on the host of `other`, which is another one."""
        place, host = self.local_peers(member).index(member), self.local_peers(other)
        return host[place % len(host)]

    def relays(self, member: int) -> tuple[int, ...]:
        """Relays of `member`, one on every other host."""
        return tuple(self.relay(member, host[0]) for host in self.hosts if member not in host)

    def relayed(self, member: int) -> tuple[int, ...]:
        """Members of other hosts whose relay `member` is."""
        local_peers = self.local_peers(member)
        others = (m for host in self.hosts if member not in host for m in host)
        return tuple(m for m in others if self.relay(m, local_peers[0]) == member)

    def bytes_out(self, to_every_other: float) -> float:
        """Bytes that the busiest host sends when each member sends every member of other hosts `to_every_other` bytes."""
        total = sum(map(len, self.hosts))
        return max(len(host) * (total - len(host)) for host in self.hosts) * to_every_other
