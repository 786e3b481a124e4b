"""Progress of a shard: records, and the clocks that follow from them.

A shard changes by records only, numbered 1, 2, 3, ... Each replica that has the same records has
the same values, clocks and rules, whichever server decided on them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from braid.ps.consistency import Consistency

__all__ = ["ConsistencySchedule", "Push", "ShardProgress", "ShardRecord", "TaskUpdate"]

Push = tuple[int, int]  # worker and clock
TaskUpdate = tuple[int, int]  # number of a task, and of its push to this shard
BEFORE = -1  # clock of the first learning rate
MAX_RATES = 1000  # where each clock has one, by so many clocks may a worker be late


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change of a shard.

    Attributes:
        number: Its place among all changes of the shard.
        pushes: Worker and clock of the gradients that were added up, in this order.
        scale: Factor of the sum.
        dropped: Pushes that came too late.
        completed: Number of clocks that are complete from now on.
        clock: Clock from which another consistency or learning rate holds.
        consistency: That consistency, if it changes.
        lr: That learning rate, if it changes.
        lr_before: Learning rate of the clocks before, if it changes for the first time.
        updates: Pushes of tasks that are in the sum.
        oldest_task: First task that may still push.
        step_lr: Learning rate that the first of the pushes has named.
    """

    number: int
    pushes: tuple[Push, ...] = ()
    scale: float = 1.0
    dropped: tuple[Push, ...] = ()
    completed: int = 0
    clock: int = 0
    consistency: Consistency | None = None
    lr: float | None = None
    lr_before: float | None = None
    updates: tuple[TaskUpdate, ...] = ()
    oldest_task: int = 0
    step_lr: float | None = None


@dataclass
class ConsistencySchedule:
    """Consistency of a table by clock.

    Attributes:
        begins: Clocks at which one begins, ascending from 0.
        values: Consistency from there on.
    """

    begins: list[int]
    values: list[Consistency]

    @classmethod
    def always(cls, consistency: Consistency) -> ConsistencySchedule:
        """Return rules that never change."""
        return cls([0], [consistency])

    def at(self, clock: int) -> Consistency:
        """Return what holds at a clock."""
        return self.values[bisect.bisect_right(self.begins, max(clock, 0)) - 1]

    def begin(self, clock: int) -> int:
        """Return the clock at which that began."""
        return self.begins[bisect.bisect_right(self.begins, max(clock, 0)) - 1]

    def change(self, clock: int, consistency: Consistency) -> None:
        """Let another consistency hold from a clock on."""
        keep = bisect.bisect_left(self.begins, clock)
        self.begins[keep:], self.values[keep:] = [clock], [consistency]


@dataclass
class ShardProgress:
    """State of a shard apart from its values; the same on all replicas.

    Attributes:
        rules: Consistency by clock.
        number: Number of the last record.
        clocks: Next clock of each worker that has pushed.
        completed: Number of complete clocks.
        num_dropped: Pushes that came too late.
        rates: Learning rates, by the clock from which they hold, ascending. Old ones are kept for
            a while: workers that are late, or send again what was accepted, ask for the same ones.
        tasks: Number of pushes of each task that have been added, from `oldest_task` on.
        oldest_task: First task that may still push.
    """

    rules: ConsistencySchedule
    number: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    completed: int = 0
    num_dropped: int = 0
    rates: dict[int, float] = field(default_factory=dict)
    tasks: dict[int, int] = field(default_factory=dict)
    oldest_task: int = 0

    def has(self, update: TaskUpdate) -> bool:
        """Whether a task's push has been added before, by whichever worker."""
        task, number = update
        return task < self.oldest_task or number < self.tasks.get(task, 0)

    def clocks_of(self, members: Mapping[int, int]) -> dict[int, int]:
        """Return the next clock of each worker, from its first clock."""
        return {worker: self.clocks.get(worker, start) for worker, start in members.items()}

    def slowest(self, members: Mapping[int, int], pushes: Sequence[Push] = ()) -> int:
        """Return the least clock of the members after some pushes, up to where rules change."""
        clocks = self.clocks_of(members)
        clocks.update({worker: clock + 1 for worker, clock in pushes if worker in clocks})
        slowest = min(clocks.values(), default=self.completed)
        return min([slowest, *(b for b in self.rules.begins if b > self.completed)])

    def advance(self, record: ShardRecord) -> None:
        """Let a record, the next one, have happened."""
        assert record.number == self.number + 1, "records have no gaps"
        self.number = record.number
        for worker, clock in (*record.pushes, *record.dropped):
            self.clocks[worker] = max(self.clocks.get(worker, 0), clock + 1)
        for task, number in record.updates:
            self.tasks[task] = max(self.tasks.get(task, 0), number + 1)
        if record.oldest_task > self.oldest_task:
            self.oldest_task = record.oldest_task
            self.tasks = {t: count for t, count in self.tasks.items() if t >= self.oldest_task}
        self.num_dropped += len(record.dropped)
        self.completed = record.completed
        if record.consistency is not None:
            self.rules.change(record.clock, record.consistency)
        if record.lr_before is not None:
            self.rates.setdefault(BEFORE, record.lr_before)
        if record.lr is not None:
            self._change_rate(record.clock, record.lr)

    def _change_rate(self, clock: int, lr: float) -> None:
        """Let a learning rate hold from a clock on; forget the oldest of many."""
        is_last = clock > next(reversed(self.rates), BEFORE)
        self.rates[clock] = lr
        if not is_last:
            self.rates = dict(sorted(self.rates.items()))
        while len(self.rates) > MAX_RATES:
            first, second = itertools.islice(self.rates, 2)
            if second > self.completed:
                return  # the first one holds still
            del self.rates[first]

    def copy(self) -> ShardProgress:
        """Return an independent copy."""
        rules = ConsistencySchedule(list(self.rules.begins), list(self.rules.values))
        return ShardProgress(
            rules,
            self.number,
            dict(self.clocks),
            self.completed,
            self.num_dropped,
            dict(self.rates),
            dict(self.tasks),
            self.oldest_task,
        )

    def rate(self, record: ShardRecord) -> float | None:
        """Return the learning rate for a record; None if it never changed."""
        if record.step_lr is not None:
            return record.step_lr
        clock = min((clock for _, clock in record.pushes), default=0)
        return next((lr for begin, lr in reversed(self.rates.items()) if begin <= clock), None)
