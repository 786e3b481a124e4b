"""Cache of earlier responses: the second time, one bit stands for a request. Pure.

Problem: training submits the same tensors in every step, and negotiating by name costs the
coordinator work for each rank and tensor.

Idea: responses have *positions*, the same on all ranks, since all put, use and evict in the same
order. A rank that submits what it submitted last time sets the bit of its position. The bits that
all ranks have set (one small "and") are ready, without a coordinator. A rank whose request has
changed clears the position's validity, and everybody negotiates that name anew.

Explicit groups come and go as one. The least recently used goes first.

Source: Horovod's response cache (2019). There, a rank's position of eviction follows its own use;
here it is agreed on like everything else.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from braid.compat.horovod.fusion.request import Request, Response

__all__ = ["Lookup", "ResponseCache"]


class Lookup(enum.Enum):
    """Result of a look into the cache."""

    HIT = enum.auto()
    MISS = enum.auto()
    CHANGED = enum.auto()


class _Entry(NamedTuple):
    response: Response
    own: Request | None  # what this rank submitted; None if it had joined


class ResponseCache:
    """Responses by position.

    Args:
        capacity: Number of positions; 0 caches nothing.

    Attributes:
        capacity: Number of positions.
        bits: Bits of the positions that are taken.
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
        """Return whether a request was agreed on before, and its position; -1 without."""
        position = self._positions.get(request.name, -1)
        if position < 0:
            return Lookup.MISS, -1
        same = self._entries[position].own == request
        return (Lookup.HIT if same else Lookup.CHANGED), position

    def response(self, position: int) -> Response:
        """Return the response at a position."""
        return self._entries[position].response

    def members(self, group: str) -> set[int]:
        """Return the positions of an explicit group."""
        return self._members.get(group, set())

    def put(self, responses: Sequence[Response], own: Sequence[Request | None]) -> list[str]:
        """Keep responses that have been agreed on now; return names that were evicted for them.

        Args:
            responses: Responses in the order agreed on; an explicit group as a whole.
            own: Requests of this rank.
        """
        gone: list[str] = []
        together: dict[str, list[tuple[Response, Request | None]]] = {}
        for response, mine in zip(responses, own, strict=True):
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
        """Forget positions, and explicit groups that they are in; return the names."""
        names = []
        for position in positions:
            entry = self._entries.get(position)
            if entry is None:  # went with its group
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
        """Number that is the same on all ranks at the same point, for tests."""
        known = [(p, self._used[p], self._entries[p].response) for p in sorted(self._entries)]
        return hash((tuple(known), tuple(self._free)))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"ResponseCache({len(self)} of {self.capacity})"
