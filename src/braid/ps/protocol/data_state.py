"""The samples of a run in shards that workers ask for, as a state machine.

    next(worker)    a shard that nobody has; waits if all are issued and some may come back
    done(shards)    finished: never issued again
    lost(worker)    what it had not finished is issued again

So fast workers get more, and a dead worker's samples are trained by others: each shard is finished
once, and may be begun several times.

Source: M. Li et al., Parameter Server, OSDI 2014, section 3.1 (the scheduler assigns workloads).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["DataState", "Issue"]

Request = tuple[str, int]


class Issue(NamedTuple):
    """Answer a request with a shard; with none when all are finished."""

    request: Request
    shard: int | None


class DataState:
    """State of one set of samples.

    Args:
        num_shards: Number of shards, of all epochs.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self._free = deque(range(num_shards))
        self._issued: dict[int, str] = {}
        self._waiting: dict[str, Request] = {}

    def next(self, node: str, request: Request, done: Iterable[int]) -> list[Issue]:
        """Give a worker its next shard, which has finished some; a request may come twice."""
        for shard in done:
            self._issued.pop(shard, None)
        self._waiting[node] = request
        return self._issue()

    def lost(self, node: str) -> list[Issue]:
        """Issue again what a worker has not finished."""
        self._waiting.pop(node, None)
        for shard in sorted(s for s, owner in self._issued.items() if owner == node):
            del self._issued[shard]
            self._free.appendleft(shard)
        return self._issue()

    @property
    def num_left(self) -> int:
        """Shards that are not finished."""
        return len(self._free) + len(self._issued)

    def _issue(self) -> list[Issue]:
        done = []
        for node, request in list(self._waiting.items()):
            held = [shard for shard, owner in self._issued.items() if owner == node]
            if held:  # the answer was lost: the same one again
                done.append(Issue(request, held[0]))
            elif self._free:
                shard = self._free.popleft()
                self._issued[shard] = node
                done.append(Issue(request, shard))
            elif not self._issued:
                done.append(Issue(request, None))
            else:
                continue  # another's may come back
            del self._waiting[node]
        return done
