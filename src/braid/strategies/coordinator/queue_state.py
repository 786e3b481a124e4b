"""The coordinator's decisions as a state machine: events in, instructions out.

    schedule ──> waiting ──> assigned to an idle worker ──> over: a result, an error, or cancelled
                    ^              │
                    └── worker lost, before the closure was over

A worker has at most `window` closures: one, or where they are short the next ones, too, so that it
need not wait for them. Some closures are run by each process of each worker first, such as those
that make its data set. The first error cancels what waits; it is reported once, and the queue then
works again.

No threads, sockets or values: closures are numbers, workers are names. Closures of the program
count from 0; those for one worker, and questions of the coordinator itself, are negative.

Source: TensorFlow 2.21, `tf.distribute.coordinator.ClusterCoordinator`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["Assign", "CancelClosure", "ClosureQueue", "EndClosure", "QueueInstruction"]


class Assign(NamedTuple):
    """Instruction: send a closure to a worker."""

    number: int
    worker: str


class EndClosure(NamedTuple):
    """Instruction: end a closure with its result or error."""

    number: int


class CancelClosure(NamedTuple):
    """Instruction: cancel a closure, since another one has failed."""

    number: int


QueueInstruction: TypeAlias = Assign | EndClosure | CancelClosure


class ClosureQueue:
    """State of the closures (calls of functions) that one coordinator has scheduled.

    Args:
        max_waiting: Number of waiting closures at which the queue is full.
        in_turns: Workers that must run the same number of closures, since each step needs one
            closure of each worker; empty if closures may run anywhere.

    Attributes:
        window: Maximum number of closures that a worker has at a time.
        failed: First closure that has failed, until `take_failure` returns it; otherwise None.
    """

    def __init__(self, max_waiting: int, in_turns: Sequence[str] = ()) -> None:
        self._max_waiting = max_waiting
        self._turns = dict.fromkeys(in_turns, 0)
        self._num_closures = 0  # but for those that have failed or were cancelled
        self._is_full = False
        self._waiting: deque[int] = deque()
        self._for_worker: dict[str, deque[int]] = {}  # closures for one worker that wait
        self._resources: list[int] = []  # closures that each process of each worker runs first
        self._running: dict[str, list[int]] = {}  # by worker that is here
        self._doomed: set[int] = set()  # that run, and are cancelled when they end
        self.window = 1
        self.failed: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether no closure should be scheduled now.

        Once full, the queue stays full until half of its places are free.
        """
        least = self._max_waiting // 2 if self._is_full else self._max_waiting
        self._is_full = len(self._waiting) >= max(1, least)
        return self._is_full

    @property
    def is_done(self) -> bool:
        """Whether no closure waits or runs, apart from closures that make a worker's data."""
        return not self._waiting and not any(
            number not in self._resources
            for running in self._running.values()
            for number in running
        )

    @property
    def num_incomplete(self) -> int:
        """Number of closures in the last step of all workers, if they are too few for it; else 0.

        Closures that have not pushed do not count.
        """
        return self._num_closures % len(self._turns) if self._turns else 0

    @property
    def is_short(self) -> bool:
        """Whether the running closures cannot end, since a step needs closures of more workers."""
        running = [n for numbers in self._running.values() for n in numbers]
        return not self._waiting and bool(running) and 0 < self.num_incomplete == len(running)

    @property
    def has_doomed(self) -> bool:
        """Whether cancelled closures still run; their results will be dropped."""
        return bool(self._doomed)

    @property
    def workers(self) -> list[str]:
        """Workers that are connected."""
        return list(self._running)

    @property
    def running(self) -> dict[str, list[int]]:
        """Closures that each worker has."""
        return {worker: list(numbers) for worker, numbers in self._running.items() if numbers}

    def num_running(self, worker: str) -> int:
        """Return the number of closures that a worker has."""
        return len(self._running.get(worker, ()))

    @property
    def oldest(self) -> int | None:
        """The closure with the lowest number that is not over; None if all are."""
        running = [n for numbers in self._running.values() for n in numbers]
        return min([n for n in (*running, *self._waiting) if n >= 0], default=None)

    def schedule(self, number: int) -> list[QueueInstruction]:
        """Add the closure with a number, for any worker."""
        self._waiting.append(number)
        self._num_closures += 1
        return self._assign()

    def ask(self, number: int) -> list[QueueInstruction]:
        """Put the coordinator's own closure `number` at the front of the queue, for any worker."""
        self._waiting.appendleft(number)
        return self._assign()

    def add_resource(self, number: int) -> list[QueueInstruction]:
        """Add the closure `number`, which every worker process runs once, before others."""
        self._resources.append(number)
        for waiting in self._for_worker.values():
            waiting.append(number)
        return self._assign()

    def ready(self, worker: str) -> list[QueueInstruction]:
        """Add a worker's new process; closures of its earlier process go to other workers."""
        again = self.lost(worker)
        self._running[worker] = []
        self._for_worker[worker] = deque(self._resources)
        return [*again, *self._assign()]

    def lost(self, worker: str) -> list[QueueInstruction]:
        """Remove a lost worker; its closures go to other workers, in their order."""
        numbers = [n for n in self._running.pop(worker, []) if n not in self._resources]
        self._for_worker.pop(worker, None)
        if worker in self._turns:
            self._turns[worker] -= sum(number >= 0 for number in numbers)
        cancelled: list[QueueInstruction] = [CancelClosure(n) for n in numbers if n in self._doomed]
        self._waiting.extendleft(n for n in reversed(numbers) if n not in self._doomed)
        self._doomed.difference_update(numbers)
        return [*cancelled, *self._assign()]

    def finished(
        self, number: int, worker: str, *, failed: bool = False, num_pushes: int = 1
    ) -> list[QueueInstruction]:
        """Record that a worker has finished a closure; if it ran twice, only the first end counts.

        Args:
            number: Number of the closure.
            worker: Worker that ran the closure.
            failed: Whether the closure has raised.
            num_pushes: Number of steps for which the closure has pushed gradients.
        """
        running = self._running.get(worker, [])
        if number in running:
            running.remove(number)
        elif number in self._resources:
            return []  # of an earlier process
        elif number in self._waiting:  # lost meanwhile, as it seemed
            self._waiting.remove(number)
        else:
            holder = next((w for w, them in self._running.items() if number in them), None)
            if holder is None:
                return []  # it was over before
            self._running[holder].remove(number)
        if number in self._doomed:
            self._doomed.discard(number)
            return [CancelClosure(number), *self._assign()]
        ends: list[QueueInstruction] = [EndClosure(number)]
        if number >= 0 and worker in self._turns:
            self._turns[worker] += num_pushes - 1
            self._num_closures += num_pushes - 1
        if failed and self.failed is None:
            self.failed = number
            ends += self._cancel_all()
        return [*ends, *self._assign()]

    def take_failure(self) -> int | None:
        """Return the failed closure once, when all closures that ran with it are over."""
        if self._doomed:
            return None
        failed, self.failed = self.failed, None
        return failed

    def _cancel_all(self) -> list[QueueInstruction]:
        cancelled: list[QueueInstruction] = [CancelClosure(number) for number in self._waiting]
        self._num_closures -= len(cancelled)
        self._waiting.clear()
        if self._turns:
            return cancelled  # those that run wait for others, and count
        running = {number for numbers in self._running.values() for number in numbers}
        self._doomed |= running.difference(self._resources)
        return cancelled

    def _assign(self) -> list[QueueInstruction]:
        """Give waiting closures to workers with the fewest."""
        assigned: list[QueueInstruction] = []
        for worker, first in self._for_worker.items():
            running = self._running[worker]
            while first and len(running) < self.window:
                running.append(first.popleft())
                assigned.append(Assign(running[-1], worker))
        while self._waiting:
            is_closure = self._waiting[0] >= 0
            free = [
                worker
                for worker, running in self._running.items()
                if len(running) < self.window and not self._for_worker[worker]
                if not is_closure or self._is_next(worker)
            ]
            if not free:
                break
            worker = min(free, key=lambda name: len(self._running[name]))
            number = self._waiting.popleft()
            self._running[worker].append(number)
            if is_closure and worker in self._turns:
                self._turns[worker] += 1
            assigned.append(Assign(number, worker))
        return assigned

    def _is_next(self, worker: str) -> bool:
        """Return whether no other worker has had fewer closures."""
        return not self._turns or self._turns[worker] == min(self._turns.values())
