"""Agreement on step counts between ranks that continue from a checkpoint and new ranks.

Problem: a hook chooses its messages by its step count. If one rank begins at 0 while others
continue, it sends different messages, or multiplies by another Q.

Idea: ranks compare their counts before the first reduction of a bucket. Ranks that count from 0
adopt the counts of the others; other differences raise an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.gradients import GradBucket

__all__ = ["AgreedNames", "agree"]


class Agreed(NamedTuple):
    """Result of `agree`: the step counts with which all ranks continue.

    Attributes:
        counts: Number of compressed steps of each parameter.
        source: Group rank that has these counts and their state.
        is_new: Whether each group rank had no state.
    """

    counts: list[int]
    source: int
    is_new: list[bool]


class AgreedNames:
    """Names of the parameters for which ranks have compared step counts already, per group."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Group, set[str]] = WeakKeyDictionary()

    def fresh(self, bucket: GradBucket) -> list[str]:
        """Add the names of a bucket's parameters; return the names that are new."""
        known = self._names.setdefault(bucket.group, set())
        new = [name for name in bucket.names if name not in known]
        known.update(new)
        return new

    def clear(self) -> None:
        """Forget the names of all parameters."""
        self._names.clear()


def agree(hook: str, bucket: GradBucket, names: Sequence[str], counts: Sequence[int]) -> Agreed:
    """Compare step counts of compressed parameters over the bucket's group; a collective.

    Args:
        hook: Name of the hook, for the message.
        bucket: Bucket that is reduced.
        names: Names of parameters, the same on all ranks.
        counts: Counts of this rank; each name has equally many. All 0 on a rank without state.

    Raises:
        ConfigError: Ranks have states of different steps; raised on all ranks.

    Cost: an all_gather of 8 bytes per count.
    """
    group = bucket.group
    local_row = torch.tensor(list(counts), dtype=torch.int64, device="cpu")
    rows = group.all_gather(local_row).view(group.size, -1).tolist()
    is_new = [not any(row) for row in rows]
    source = is_new.index(False) if False in is_new else 0
    odd = [r for r, row in enumerate(rows) if not is_new[r] and row != rows[source]]
    if odd:
        place = next(i for i, n in enumerate(rows[source]) if n != rows[odd[0]][i])
        listed = ", ".join(
            f"{row[place]} on rank {rank}" for rank, row in zip(group.ranks, rows, strict=True)
        )
        msg = (
            f"the state of {hook} belongs to different steps on different ranks, for parameter "
            f"{names[place % len(names)]!r}: {listed}. On each rank, load the hook_state() of "
            "the same step, and load nothing on new ranks"
        )
        raise ConfigError(msg)
    return Agreed(rows[source], source, is_new)
