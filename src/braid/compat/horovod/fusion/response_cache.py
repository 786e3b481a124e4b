"""Cache of earlier responses, so that a repeated request is sent as one bit. Pure.

Problem: training submits the same tensors in every step, and negotiation by name costs the
coordinator work for each rank and tensor.

Idea: responses have *positions*, the same on all ranks, since all ranks put, use and evict in the
same order. A rank that repeats a request sets the bit of its position. Positions with the bits of
all ranks set (one small "and") are ready, without a coordinator. A rank with a changed request
clears the validity bit of its position, and all ranks negotiate that name again.

Explicit groups are added and evicted as a whole, the least recently used first.

Source: Horovod's response cache (2019). There, a rank evicts by its local order of use; here all
ranks evict in the same order.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from braid.compat.horovod.fusion.request import Request, Response

__all__ = ["Lookup", "ResponseCache"]


class Lookup(enum.Enum):
    """Result of a lookup: the request is cached, is not cached, or has changed."""

    HIT = enum.auto()
    MISS = enum.auto()
    CHANGED = enum.auto()


class _Entry(NamedTuple):
    response: Response
    request: Request | None  # this rank's request; None if it had joined


class ResponseCache:
    """Cache of responses, by positions that are the same on all ranks.

    Args:
        capacity: Number of positions; 0 caches nothing.

    Attributes:
        capacity: Number of positions.
        bits: Bits of the occupied positions.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bits = 0
        self._entries: dict[int, _Entry] = {}
        self._used: dict[int, int] = {}  # number of the last use
        self._num_uses = 0
        self._positions: dict[str, int] = {}
        self._members: dict[str, set[int]] = {}
        self._free = list(range(capacity - 1, -1, -1))

    def look_up(self, request: Request) -> tuple[Lookup, int]:
        """Return whether a request is cached, and its position; -1 if its name is not cached."""
        position = self._positions.get(request.name, -1)
        if position < 0:
            return Lookup.MISS, -1
        same = self._entries[position].request == request
        return (Lookup.HIT if same else Lookup.CHANGED), position

    def response(self, position: int) -> Response:
        """Return the response at a position."""
        return self._entries[position].response

    def members(self, group: str) -> set[int]:
        """Return the positions of the responses that belong to the explicit group `group`."""
        return self._members.get(group, set())

    def put(self, responses: Sequence[Response], requests: Sequence[Request | None]) -> list[str]:
        """Add responses; return the names that were evicted for them.

        Args:
            responses: Responses in the order agreed on; an explicit group as a whole.
            requests: Requests of this rank.
        """
        gone: list[str] = []
        together: dict[str, list[tuple[Response, Request | None]]] = {}
        for response, mine in zip(responses, requests, strict=True):
            key = f"group {response.request.group}" if response.request.group else response.name
            together.setdefault(key, []).append((response, mine))
        for members in together.values():
            if len(members) > self.capacity or any(response.error for response, _ in members):
                continue
            group = members[0][0].request.group
            known = [self._positions[r.name] for r, _ in members if r.name in self._positions]
            gone += self.erase([*known, *self.members(group)])  # a group may have changed
            while len(self._free) < len(members):
                gone += self.erase([min(self._used, key=lambda p: (self._used[p], p))])
            places = {self._free.pop(): member for member in members}
            for position, (response, mine) in places.items():
                self._entries[position] = _Entry(response, mine)
                self._positions[response.name] = position
                self.bits |= 1 << position
            self.use(places)
            if group:
                self._members[group] = set(places)
        return gone

    def use(self, positions: Iterable[int]) -> None:
        """Record that positions have been used now."""
        self._num_uses += 1
        self._used.update(dict.fromkeys(positions, self._num_uses))

    def erase(self, positions: Iterable[int]) -> list[str]:
        """Remove positions, and all members of their explicit groups; return the removed names."""
        names = []
        for position in positions:
            entry = self._entries.get(position)
            if entry is None:  # removed with its group
                continue
            together = self._members.pop(entry.response.request.group, {position})
            for member in sorted(together):
                name = self._entries.pop(member).response.name
                del self._positions[name], self._used[member]
                self.bits &= ~(1 << member)
                self._free.append(member)
                names.append(name)
        return names

    @property
    def digest(self) -> int:
        """Hash of the contents, equal on all ranks after the same cycle, for tests."""
        known = [(p, self._used[p], self._entries[p].response) for p in sorted(self._entries)]
        return hash((tuple(known), tuple(self._free)))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"ResponseCache({len(self)} of {self.capacity})"
