"""Exchanges of parts between the ranks of two layouts, as data.

    source: 2 ranks, rows         target: 3 ranks, columns

    rank 0   a a a a a a          rank 2   a a . . . .
    rank 1   b b b b b b                   b b . . . .      from 0: a a, from 1: b b

A receiver takes each part from one of the ranks that hold it: from itself if it holds the part,
else from the holder at the receiver's index modulo their number, so that replicas share the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from braid.errors import raise_all
from braid.programs.layout import Box, Layout

__all__ = ["Exchange", "intersection", "relative"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Transfers of a tensor's shards between the ranks of a group, for a new layout.

    Attributes:
        shape: Shape of the whole tensor.
        source: Layout before.
        target: Layout afterwards.
        source_ranks: Group rank of each rank of the source's mesh.
        target_ranks: Group rank of each rank of the target's mesh.
        size: Number of ranks of the group.

    Raises:
        ConfigError: The layouts do not fit the shape, are partial, or the ranks of a mesh are not
            distinct ranks of the group in the right number; the message names all problems.
    """

    shape: tuple[int, ...]
    source: Layout
    target: Layout
    source_ranks: Sequence[int]
    target_ranks: Sequence[int]
    size: int

    def __post_init__(self) -> None:
        sides = (
            ("source", self.source, list(self.source_ranks)),
            ("target", self.target, list(self.target_ranks)),
        )
        problems = []
        for role, layout, ranks in sides:
            if len(layout.dims) != len(self.shape):
                problems.append(
                    f"the {role} layout {layout} has {len(layout.dims)} dims, but the tensor's "
                    f"shape {list(self.shape)} has {len(self.shape)}: use one entry per dim"
                )
            if layout.partial:
                problems.append(
                    f"the {role} layout {layout} is partial: redistribute to one without partial "
                    "axes"
                )
            members = set(ranks) & set(range(self.size))
            if not len(ranks) == len(members) == layout.mesh.size:
                problems.append(
                    f"the {role} mesh {layout.mesh} needs {layout.mesh.size} different ranks "
                    f"from 0 to {self.size - 1}, got {ranks}: correct the list of ranks"
                )
        raise_all(problems)

    def source_box(self, rank: int) -> Box | None:
        """Return the slices of the tensor that a rank has before the exchange; None if none."""
        return _box(self.shape, self.source, self.source_ranks, rank)

    def target_box(self, rank: int) -> Box | None:
        """Return the slices of the tensor that a rank has after the exchange; None if none."""
        return _box(self.shape, self.target, self.target_ranks, rank)

    def received(self, rank: int) -> Iterator[tuple[int, Box]]:
        """Yield (group rank of the sender, slices) for everything that a rank receives."""
        whole = self.target_box(rank)
        if whole is None:
            return
        for box, holders in self._holders().items():
            part = intersection(box, whole)
            if part is not None:
                yield self._sender(holders, rank), part

    def sent(self, rank: int) -> Iterator[tuple[int, Box]]:
        """Yield (group rank of the receiver, slices) for everything that a rank sends."""
        box = self.source_box(rank)
        if box is None:
            return
        holders = self._holders()[box]
        for index, receiver in enumerate(self.target_ranks):
            part = intersection(box, self.target.box(self.shape, index))
            if part is not None and self._sender(holders, receiver) == rank:
                yield receiver, part

    def _holders(self) -> dict[Box, list[int]]:
        holders: dict[Box, list[int]] = {}
        for index, rank in enumerate(self.source_ranks):
            holders.setdefault(self.source.box(self.shape, index), []).append(rank)
        return holders

    def _sender(self, holders: Sequence[int], receiver: int) -> int:
        if receiver in holders:
            return receiver
        return holders[list(self.target_ranks).index(receiver) % len(holders)]


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two slices of a tensor; None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(begin < end for begin, end in common) else None


def relative(part: Box, box: Box) -> tuple[slice, ...]:
    """Return the indices of slices relative to the larger slices that contain them."""
    return tuple(
        slice(begin - first, end - first)
        for (begin, end), (first, _) in zip(part, box, strict=True)
    )


def _box(shape: Sequence[int], layout: Layout, ranks: Sequence[int], rank: int) -> Box | None:
    return layout.box(shape, list(ranks).index(rank)) if rank in ranks else None
