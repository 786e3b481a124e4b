"""The decisions of a table's server, as a state machine: events in, instructions out.

    push(worker, clock)   keep it, or drop it; apply a clock that is complete; answer whom it frees
    pull(worker, clock)   answer, or park until enough workers have pushed
    leave(worker)         nobody waits for it any more

No tensors, threads, sockets or clocks of the host: what is kept is named by worker and clock.

                 clock 0        clock 1
    worker 0     push ──┐       pull: parked
    worker 1            push ── apply 0, answer worker 0's pull

Source: M. Li et al., OSDI 2014, section 3.4; Q. Ho et al., NeurIPS 2013.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from braid.errors import CommError
from braid.ps.consistency import Consistency

__all__ = ["Answer", "Apply", "Drop", "Instruction", "Keep", "TableState"]


class Keep(NamedTuple):
    """Keep the value of a push until it is applied."""

    worker: int
    clock: int


class Drop(NamedTuple):
    """Forget the value of a push, which came too late."""

    worker: int
    clock: int


class Apply(NamedTuple):
    """Add up kept values in this order, and let the optimizer step.

    Attributes:
        pushes: Worker and clock of each value.
        scale: Factor of the sum.
    """

    pushes: tuple[tuple[int, int], ...]
    scale: float


class Answer(NamedTuple):
    """Send the table to a worker.

    Attributes:
        worker: Worker that has pulled.
        request: Number of its request.
    """

    worker: int
    request: int


Instruction: TypeAlias = Keep | Drop | Apply | Answer


class TableState:
    """State of one table on one server.

    Args:
        workers: Numbers of the workers.
        consistency: When pushes are applied, and pulls answered.

    Attributes:
        clocks: Number of clocks that each worker has pushed.
        applied: Number of clocks that are complete.
        num_dropped: Pushes that came too late.
    """

    def __init__(self, workers: Iterable[int], consistency: Consistency) -> None:
        self.consistency = consistency
        self.clocks = dict.fromkeys(sorted(workers), 0)
        self.applied = 0
        self.num_dropped = 0
        self._kept: dict[int, set[int]] = {}  # workers, by clock
        self._parked: list[tuple[int, int, int]] = []  # worker, clock, request

    def push(self, worker: int, clock: int) -> list[Instruction]:
        """Decide on a push.

        Raises:
            CommError: The worker is not known, or does not push its next clock.
        """
        self._check(worker)
        if clock != self.clocks[worker]:
            msg = f"worker {worker} pushes clock {clock}, and its next one is {self.clocks[worker]}"
            raise CommError(msg)
        self.clocks[worker] = clock + 1
        if not self.consistency.by_clock:
            return [
                Keep(worker, clock),
                Apply(((worker, clock),), self._scale(len(self.clocks))),
                *self._freed(),
            ]
        if clock < self.applied:
            return self._late(worker, clock)
        self._kept.setdefault(clock, set()).add(worker)
        return [Keep(worker, clock), *self._completed()]

    def pull(self, worker: int, clock: int, request: int) -> list[Instruction]:
        """Decide on a pull before a worker's clock.

        Raises:
            CommError: The worker is not known.
        """
        self._check(worker)
        self._parked.append((worker, clock, request))
        return list(self._freed())

    def leave(self, worker: int) -> list[Instruction]:
        """Wait for a worker no longer."""
        self.clocks.pop(worker, None)
        self._parked = [parked for parked in self._parked if parked[0] != worker]
        return [*self._completed(), *self._freed()]

    def waiting(self) -> list[str]:
        """Return who waits for whom, as text."""
        lines = []
        for worker, clock, _ in self._parked:
            missing = [w for w, c in self.clocks.items() if c < clock - self.consistency.staleness]
            names = ", ".join(f"{w} (at clock {self.clocks[w]})" for w in missing)
            lines.append(f"worker {worker} waits at clock {clock} for the pushes of {names}")
        return lines

    def _late(self, worker: int, clock: int) -> list[Instruction]:
        if self.consistency.late == "drop":
            self.num_dropped += 1
            return [Drop(worker, clock), *self._freed()]
        scale = self._scale(self._needed())
        return [Keep(worker, clock), Apply(((worker, clock),), scale), *self._freed()]

    def _completed(self) -> list[Instruction]:
        """Return the clocks that are complete now, and the answers that they free.

        What a worker has pushed before it left is added, and counts for no other worker.
        """
        done: list[Instruction] = []
        while len(self._kept.get(self.applied, set()) & self.clocks.keys()) >= self._needed() > 0:
            kept = self._kept.pop(self.applied)
            pushes = tuple((worker, self.applied) for worker in sorted(kept))
            done.append(Apply(pushes, self._scale(len(pushes))))
            self.applied += 1
        return [*done, *self._freed()]

    def _needed(self) -> int:
        """Return of how many of the workers that are here a clock needs pushes."""
        quorum = self.consistency.quorum
        return len(self.clocks) if quorum is None else min(quorum, len(self.clocks))

    def _scale(self, count: int) -> float:
        return 1.0 / count if self.consistency.aggregate == "mean" else 1.0

    def _freed(self) -> list[Instruction]:
        """Return the answers to parked pulls that need not wait any more."""
        if self.consistency.by_clock:
            reached = self.applied
        else:
            reached = min(self.clocks.values(), default=0)
        limit = reached + self.consistency.staleness
        freed = [parked for parked in self._parked if parked[1] <= limit]
        self._parked = [parked for parked in self._parked if parked[1] > limit]
        return [Answer(worker, request) for worker, _, request in freed]

    def _check(self, worker: int) -> None:
        if worker not in self.clocks:
            known = ", ".join(map(str, self.clocks)) or "none"
            msg = f"worker {worker} is not of this table, whose workers are {known}"
            raise CommError(msg)
