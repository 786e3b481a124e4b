"""Ranks that go on from a checkpoint with others that are new: hooks that count steps must count the same.

Problem: a hook decides by its count what it sends. One that begins at 0 beside others that go on sends something else, or multiplies by another Q.

Idea: before a bucket's first reduction ranks compare their counts. Those that count from 0 go on with the others; others that differ are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from braid.comm import Group
from braid.errors import ConfigError
from braid.params import GradBucket

__all__ = ["Agreed", "AgreedNames", "agree"]


class Agreed(NamedTuple):
    """What all ranks count.

    Attributes:
        counts: Of the parameters asked for.
        source: Group rank that has them, and what belongs to them.
        is_new: By group rank, whether it had none.
    """

    counts: list[int]
    source: int
    is_new: list[bool]


class AgreedNames:
    """Parameters on whose counts the ranks of a group have agreed; a hook may go from one group to another."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Group, set[str]] = WeakKeyDictionary()

    def fresh(self, bucket: GradBucket) -> list[str]:
        """Names in the bucket that are not among them, and are from now on."""
        known = self._names.setdefault(bucket.group, set())
        found = [name for name in bucket.names if name not in known]
        known.update(found)
        return found

    def clear(self) -> None:
        """There are others now."""
        self._names.clear()


def agree(hook: str, bucket: GradBucket, names: Sequence[str], counts: Sequence[int]) -> Agreed:
    """Compare counts; a collective.

    Args:
        hook: Its name, for the message.
        bucket: What is reduced.
        names: Parameters, the same on all ranks.
        counts: This rank's, the same number for each name; all 0 on a rank without a state.

    Raises:
        ConfigError: On all ranks: there are ranks with states of different steps.

    Cost: an all_gather of 8 bytes a count.
    """
    group = bucket.group
    own = torch.tensor(list(counts), dtype=torch.int64, device="cpu")
    rows = group.all_gather(own).view(group.size, -1).tolist()
    is_new = [not any(row) for row in rows]
    source = is_new.index(False) if False in is_new else 0
    odd = [r for r, row in enumerate(rows) if not is_new[r] and row != rows[source]]
    if odd:
        place = next(i for i, n in enumerate(rows[source]) if n != rows[odd[0]][i])
        found = ", ".join(
            f"{row[place]} on rank {rank}" for rank, row in zip(group.ranks, rows, strict=True)
        )
        msg = (
            f"expected the state of {hook} of the same step on every rank, found for parameter {names[place % len(names)]!r} {found}: load what "
            "hook_state() returned on each rank in one and the same step, and nothing on ranks that are new"
        )
        raise ConfigError(msg)
    return Agreed(rows[source], source, is_new)
