"""Assignment of shards of samples to workers, as a state machine.

    next(worker)    a shard that no worker has; waits if all are issued and some may come back
    done(shards)    finished: never issued again
    lost(worker)    its unfinished shards are issued again

Fast workers get more shards, and other workers train the samples of a dead one: each shard is
finished once, and may be begun several times.

Source: M. Li et al., Parameter Server, OSDI 2014, section 3.1 (the scheduler assigns workloads).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["DataState", "Issue"]

Request = tuple[str, int]


class Issue(NamedTuple):
    """Instruction: answer a request with a shard, or with None when all shards are finished."""

    request: Request
    shard: int | None


class DataState:
    """Assignment of the shards of one set of samples to workers.

    Args:
        num_shards: Number of shards, over all epochs.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self._free = deque(range(num_shards))
        self._issued: dict[int, str] = {}
        self._waiting: dict[str, Request] = {}

    def next(self, node: str, request: Request, finished: Iterable[int]) -> list[Issue]:
        """Record a worker's finished shards of samples, and request its next shard.

        The result has the answers to all requests that can be answered now.
        """
        for shard in finished:
            self._issued.pop(shard, None)
        self._waiting[node] = request
        return self._issue()

    def lost(self, node: str) -> list[Issue]:
        """Issue the unfinished shards of a lost worker again."""
        self._waiting.pop(node, None)
        for shard in sorted(s for s, owner in self._issued.items() if owner == node):
            del self._issued[shard]
            self._free.appendleft(shard)
        return self._issue()

    @property
    def num_left(self) -> int:
        """Number of shards that are not finished."""
        return len(self._free) + len(self._issued)

    def _issue(self) -> list[Issue]:
        issues = []
        for node, request in list(self._waiting.items()):
            held = [shard for shard, owner in self._issued.items() if owner == node]
            if held:  # the answer was lost: issue the same shard again
                issues.append(Issue(request, held[0]))
            elif self._free:
                shard = self._free.popleft()
                self._issued[shard] = node
                issues.append(Issue(request, shard))
            elif not self._issued:
                issues.append(Issue(request, None))
            else:
                continue  # a shard of another worker may come back
            del self._waiting[node]
        return issues
