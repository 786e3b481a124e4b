"""Agreement on step counts between ranks that go on from a checkpoint and ranks that are new.

Problem: a hook decides by its count what it sends. One that begins at 0 beside others that go on
sends something else, or multiplies by another Q.

Idea: before a bucket's first reduction ranks compare their counts. Ranks that count from 0 go on
with the others; other differences are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.gradients import GradBucket

__all__ = ["Agreed", "AgreedNames", "agree"]


class Agreed(NamedTuple):
    """Counts that all ranks go on with.

    Attributes:
        counts: Counts of the given parameters.
        source: Group rank that has these counts, and the state that belongs to them.
        is_new: Whether a rank had no state, by group rank.
    """

    counts: list[int]
    source: int
    is_new: list[bool]


class AgreedNames:
    """Names of parameters on whose counts ranks have agreed, by group: hooks may change groups."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Group, set[str]] = WeakKeyDictionary()

    def fresh(self, bucket: GradBucket) -> list[str]:
        """Add the names in a bucket; return those that are new."""
        known = self._names.setdefault(bucket.group, set())
        new = [name for name in bucket.names if name not in known]
        known.update(new)
        return new

    def clear(self) -> None:
        """Forget all names."""
        self._names.clear()


def agree(hook: str, bucket: GradBucket, names: Sequence[str], counts: Sequence[int]) -> Agreed:
    """Compare counts; a collective.

    Args:
        hook: Name of the hook, for the message.
        bucket: Bucket that is reduced.
        names: Names of parameters, the same on all ranks.
        counts: Counts of this rank, equally many for each name; all 0 on a rank without a state.

    Raises:
        ConfigError: Ranks have states of different steps; raised on all ranks.

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
        listed = ", ".join(
            f"{row[place]} on rank {rank}" for rank, row in zip(group.ranks, rows, strict=True)
        )
        msg = (
            f"the state of {hook} is of different steps on different ranks, for parameter "
            f"{names[place % len(names)]!r}: {listed}. Load what hook_state() returned on each "
            "rank in one and the same step, and nothing on ranks that are new"
        )
        raise ConfigError(msg)
    return Agreed(rows[source], source, is_new)
