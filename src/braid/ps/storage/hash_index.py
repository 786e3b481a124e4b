"""A hash table from ids to slots, for whole batches of ids at once.

Problem: a dict needs a Python object and some 100 ns for each id, and holds the interpreter.

Idea: open addressing in a tensor of buckets. A round looks at one bucket for each id that is still
open; after the first round few are left. Buckets hold slots, and slots have ids, so each int64 is a
legal id: -1 in a bucket says that it is empty, -2 that its id was removed.

    id ── mix ──> bucket ── slot ──> ids[slot] == id ?   next bucket: 1, 3, 6, 10, ... further on

Steps that grow by one reach each of 2^k buckets. At most half of the buckets are in use.

Ids that want the same empty bucket all write to it, and then read it: the one that is there has it.
Which one that is depends on torch, and shows nowhere outside.

Source: D. Knuth, The art of computer programming 3, section 6.4 (open addressing).
"""

from __future__ import annotations

import torch

from braid.ps.storage.keys import mix

__all__ = ["HashIndex"]

EMPTY, REMOVED = -1, -2
SMALLEST = 64  # buckets


class HashIndex:
    """Slots of ids. The owner keeps the ids of slots, and hands them in."""

    def __init__(self) -> None:
        self._buckets = torch.full((SMALLEST,), EMPTY)
        self._num_used = 0  # buckets that are not empty, at most

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return len(self._buckets)

    def find(self, ids: torch.Tensor, ids_of_slots: torch.Tensor) -> torch.Tensor:
        """Return the slots of ids, and -1 for those that have none.

        Args:
            ids: Ids in any order, also repeated.
            ids_of_slots: Ids by slot; at least two.

        Shape:
            ids: [n]; ids_of_slots: [capacity]; result: [n].

        Cost: some 50 ns for each id if tables do not fit in caches, plus 20 us for each round.
        """
        return self._probe(ids, ids_of_slots)[0]

    def has_room(self, count: int) -> bool:
        """Return whether as many new ids can be inserted without a rebuild."""
        return 2 * (self._num_used + count) <= self.num_buckets

    def insert(self, ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Enter distinct ids that have no slot, for which there is room; shape [n] each."""
        self._num_used += len(ids)
        mask = self.num_buckets - 1
        positions = mix(ids).bitwise_and_(mask)
        step = 0
        while len(slots):
            free = self._buckets.take(positions) < 0
            self._buckets.scatter_(0, positions.masked_select(free), slots.masked_select(free))
            lost = self._buckets.take(positions) != slots
            slots = slots.masked_select(lost)
            step += 1
            positions = positions.masked_select(lost).add_(step).bitwise_and_(mask)

    def rebuild(self, ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Forget all, and enter distinct ids in a table of which at most a quarter is in use.

        So as many ids again can be inserted before the next rebuild.
        """
        size = max(SMALLEST, 1 << (4 * len(ids) - 1).bit_length())
        self._buckets = torch.full((size,), EMPTY)
        self._num_used = 0
        self.insert(ids, slots)

    def remove(self, ids: torch.Tensor, ids_of_slots: torch.Tensor) -> None:
        """Remove ids that have slots."""
        _, positions = self._probe(ids, ids_of_slots)
        self._buckets.index_fill_(0, positions, REMOVED)

    def _probe(
        self, ids: torch.Tensor, ids_of_slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots, and the buckets where the search has ended."""
        mask = self.num_buckets - 1
        positions = mix(ids).bitwise_and_(mask)
        slots = self._buckets.take(positions)
        # take(-1) is the last id: a match with it counts for slots that are in use only
        hits = (ids_of_slots.take(slots) == ids).logical_and_(slots >= 0)
        open_ = (slots != EMPTY).logical_and_(hits.logical_not()).nonzero().flatten()
        slots.masked_fill_(hits.logical_not_(), EMPTY)
        step = 0
        while len(open_):
            step += 1
            places = positions.index_select(0, open_).add_(step).bitwise_and_(mask)
            there = self._buckets.take(places)
            same = ids_of_slots.take(there) == ids.index_select(0, open_)
            hits = same.logical_and_(there >= 0)
            positions.index_copy_(0, open_, places)
            slots.index_copy_(0, open_, there.masked_fill(hits.logical_not(), EMPTY))
            goes_on = (there != EMPTY).logical_and_(hits.logical_not_())
            open_ = open_.masked_select(goes_on)
        return slots, positions
