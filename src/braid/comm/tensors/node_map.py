"""Members of a group by host, and the slices of tensors that they work on.

Members on one host are *local peers*. They divide a tensor into *slices*; the number of slices is
the number of members on the smallest host. Members that work on one slice, one per host, are
*cross-node peers*:

            host a         host b
    slice 0  member 0  ...  member 3      cross-node peers
    slice 1  member 1  ...  member 4      cross-node peers
            member 2                     no slice: host b has only two members
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["NodeMap"]


class NodeMap(NamedTuple):
    """Members of a group by host.

    Attributes:
        hosts: Group ranks of each host's members, in order; hosts in the order of their first
            members.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> NodeMap:
        """Return the map for `numbers`, the number of each member's host."""
        members: dict[int, list[int]] = {}
        for member, number in enumerate(numbers):
            members.setdefault(number, []).append(member)
        return cls(tuple(tuple(ranks) for ranks in members.values()))

    @property
    def fewest(self) -> int:
        """Number of members of the smallest host."""
        return min(map(len, self.hosts))

    @property
    def most(self) -> int:
        """Number of members of the largest host."""
        return max(map(len, self.hosts))

    @property
    def num_slices(self) -> int:
        """Number of slices of a tensor: the number of members of the smallest host."""
        return self.fewest

    def local_peers(self, member: int) -> tuple[int, ...]:
        """Return the members of the host of `member`, including `member`."""
        return next(host for host in self.hosts if member in host)

    def slice(self, member: int) -> int:
        """Return the number of the slice of a tensor that `member` works on; -1 for none."""
        index = self.local_peers(member).index(member)
        return index if index < self.num_slices else -1

    def cross_node_peers(self, member: int) -> tuple[int, ...]:
        """Return the members that work on the slice of `member`, in the order of hosts."""
        index = self.slice(member)
        return (member,) if index < 0 else tuple(host[index] for host in self.hosts)

    def relay(self, member: int, other: int) -> int:
        """Return the member on the host of `other` that forwards messages of `member` to that host.

        `other` must not be on the host of `member`.
        """
        place, host = self.local_peers(member).index(member), self.local_peers(other)
        return host[place % len(host)]

    def relays(self, member: int) -> tuple[int, ...]:
        """Return the ranks that forward messages of `member`, one on every other host."""
        return tuple(self.relay(member, host[0]) for host in self.hosts if member not in host)

    def relayed(self, member: int) -> tuple[int, ...]:
        """Return the members of other hosts that `member` forwards messages for, on its host."""
        local_peers = self.local_peers(member)
        others = (m for host in self.hosts if member not in host for m in host)
        return tuple(m for m in others if self.relay(m, local_peers[0]) == member)

    def bytes_out(self, to_every_other: float) -> float:
        """Return the bytes that the busiest host sends.

        Args:
            to_every_other: Bytes that each member sends to every member of other hosts.
        """
        total = sum(map(len, self.hosts))
        return max(len(host) * (total - len(host)) for host in self.hosts) * to_every_other
