"""The pushes that the head of a shard keeps until they are in a record."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from braid.ps.protocol.instructions import Request
from braid.ps.protocol.progress import Push, ShardProgress, TaskUpdate

__all__ = ["KeptPushes", "TaskKey"]


class TaskKey(NamedTuple):
    """Identity of a push that several workers may send; servers apply it once.

    Attributes:
        task: Number of the task, which another worker repeats if its worker is lost.
        number: Number of the push among the task's pushes to this table.
        oldest: First task that is not finished: servers forget all tasks before it.
    """

    task: int
    number: int
    oldest: int = 0


class KeptPushes:
    """Pushes by worker and clock, with the requests that wait for their answers.

    Attributes:
        requests: Last request of each push.
        eligible: Pushes without a missing clock before them, in order of arrival.
    """

    def __init__(self) -> None:
        self.requests: dict[Push, Request] = {}
        self.eligible: list[Push] = []
        self._keys: dict[Push, TaskKey] = {}
        self._lrs: dict[Push, float] = {}  # learning rates that pushes name

    def add(self, push: Push, request: Request, key: TaskKey | None, lr: float | None) -> bool:
        """Keep a push until it is in a record (a change of the shard); return whether it is new.

        `request` is answered later; it replaces the request of an earlier copy of the push.
        """
        is_new = push not in self.requests
        self.requests[push] = request
        if is_new and key is not None:
            self._keys[push] = key
        if is_new and lr is not None:
            self._lrs[push] = lr
        return is_new

    def admit(self, worker: int, progress: ShardProgress, start: int) -> None:
        """Mark a worker's pushes from clock `start` on as eligible, up to the first missing one."""
        known = [c + 1 for w, c in self.eligible if w == worker]
        clock = max([progress.clocks.get(worker, start), *known])
        while (worker, clock) in self.requests or progress.is_over(clock):
            if (worker, clock) in self.requests:
                self.eligible.append((worker, clock))
            clock += 1

    def other_rate(self, clock: int, lr: float | None) -> tuple[int, float] | None:
        """Return a worker whose kept push of a clock has another learning rate, and the rate."""
        for (worker, other), rate in self._lrs.items():
            if other == clock and lr not in (None, rate):
                return worker, rate
        return None

    def details(self, pushes: Sequence[Push]) -> tuple[tuple[TaskUpdate, ...], int, float | None]:
        """Return the tasks' updates in pushes, the first open task, and the first push's rate."""
        updates: list[TaskUpdate] = []
        oldest, lr = 0, None
        for push in pushes:
            if (key := self._keys.get(push)) is not None:
                updates.append((key.task, key.number))
                oldest = max(oldest, key.oldest)
            if lr is None:
                lr = self._lrs.get(push)
        return tuple(updates), oldest, lr

    def repeated(self, pushes: Sequence[Push], progress: ShardProgress) -> tuple[Push, ...]:
        """Return the pushes of tasks that were applied before, or come twice in `pushes`."""
        repeated, seen = [], set()
        for push in pushes:
            key = self._keys.get(push)
            if key is None:
                continue
            update = key.task, key.number
            if update in seen or progress.has(update):
                repeated.append(push)
            seen.add(update)
        return tuple(repeated)

    def clocks_after(self, clocks: dict[int, int]) -> dict[int, int]:
        """Return the first clock of each worker, from `clocks` on, without a kept push."""
        return {
            worker: next(c for c in count(clock) if (worker, c) not in self.requests)
            for worker, clock in clocks.items()
        }

    def take(self, pushes: Sequence[Push]) -> list[Request]:
        """Remove pushes that are now in a record (a change); return the requests to answer."""
        taken = set(pushes)
        self.eligible = [push for push in self.eligible if push not in taken]
        for push in pushes:
            self._keys.pop(push, None)
            self._lrs.pop(push, None)
        return [*map(self.requests.pop, pushes)]
