"""The pushes that the head of a shard keeps until they are in a record."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from braid.ps.protocol.instructions import Request
from braid.ps.protocol.progress import Push, ShardProgress

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

    def keys(self, pushes: Sequence[Push]) -> list[TaskKey]:
        """Return the task keys of those pushes which belong to a task."""
        return [self._keys[push] for push in pushes if push in self._keys]

    def other_rates(self, clock: int, lr: float | None) -> dict[int, float]:
        """Return the learning rates of the kept pushes of a clock that differ, by worker."""
        rates = {worker: rate for (worker, c), rate in self._lrs.items() if c == clock}
        return {worker: rate for worker, rate in rates.items() if lr not in (None, rate)}

    def lr(self, pushes: Sequence[Push]) -> float | None:
        """Return the learning rate of the first push that sets one; None if no push does."""
        return next((self._lrs[push] for push in pushes if push in self._lrs), None)

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
        return [self.requests.pop(push) for push in pushes]
