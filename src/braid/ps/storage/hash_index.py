"""A hash table from ids to slots, for whole batches of ids.

Problem: a dict needs a Python object and some 100 ns for each id, and holds the interpreter lock.

Idea: open addressing in a tensor of buckets. A round probes one bucket for each unresolved id; only
few ids remain after the first round. A bucket contains a slot, and the owner knows the id of each
slot, so every int64 is a valid id. A bucket of -1 is empty; -2 means that its id was removed.

    id ── mix ──> bucket ── slot ──> ids[slot] == id ?   next bucket: 1, 3, 6, 10, ... further on

Steps that grow by one reach each of 2^k buckets. At most half of the buckets are in use.

Several ids that probe the same empty bucket all write to it and then read it: the id that is stored
there wins. The winner depends on torch, but results of `find` do not.

Source: D. Knuth, The art of computer programming 3, section 6.4 (open addressing).
"""

from __future__ import annotations

import torch

from braid.ps.storage.keys import mix

__all__ = ["HashIndex"]

EMPTY, REMOVED = -1, -2
SMALLEST = 64  # buckets


class HashIndex:
    """Map from ids to slots (row indices). The owner stores the id of each slot."""

    def __init__(self) -> None:
        self._buckets = torch.full((SMALLEST,), EMPTY)
        self._num_used = 0  # buckets that are not empty, at most

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return len(self._buckets)

    def find(self, ids: torch.Tensor, ids_of_slots: torch.Tensor) -> torch.Tensor:
        """Return the slot (row index) of each id, and -1 for ids without a slot.

        Args:
            ids: Ids in any order; may repeat.
            ids_of_slots: Ids by slot; at least two.

        Shape:
            ids: [n]; ids_of_slots: [capacity]; result: [n].

        Cost: about 50 ns per id if the tables do not fit in caches, plus 20 us per round.
        """
        return self._probe(ids, ids_of_slots)[0]

    def has_room(self, count: int) -> bool:
        """Return whether `count` new ids can be inserted without a rebuild."""
        return 2 * (self._num_used + count) <= self.num_buckets

    def insert(self, ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Insert distinct new ids with their slots; needs `has_room`; shape [n] each."""
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
        """Replace all contents by distinct ids, in a table that is at most a quarter full.

        The number of ids can then double before the next rebuild.
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
        """Return slots, and the bucket at which the search for each id has ended."""
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
