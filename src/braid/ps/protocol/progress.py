"""Progress of a shard: its records, and the clocks that result from them.

A shard changes only through records, numbered 1, 2, 3, ... All replicas with the same records have
the same values, clocks and rules, no matter which servers decided on the records.
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
MAX_RATES = 1000  # if the rate changes every clock, a worker may be this number of clocks late


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change of a shard, such as an applied sum of pushes, which all replicas repeat.

    Attributes:
        number: Index among all changes of the shard, from 1.
        pushes: Worker and clock of each summed gradient, in the order of summation.
        scale: Factor of the sum.
        dropped: Pushes that are not applied: they came too late, or repeat a task's push.
        completed: Number of complete clocks after this record.
        clock: First clock of the new consistency or learning rate.
        consistency: New consistency, if it changes.
        lr: New learning rate, if it changes.
        lr_before: Learning rate of the earlier clocks, if it changes for the first time.
        updates: Pushes of tasks that are in the sum.
        oldest_task: First task that may still push.
        step_lr: Learning rate of the first push that sets one.
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
        begins: First clock of each consistency, ascending from 0.
        values: Each consistency, in the same order.
    """

    begins: list[int]
    values: list[Consistency]

    @classmethod
    def always(cls, consistency: Consistency) -> ConsistencySchedule:
        """Return a schedule with one consistency for all clocks."""
        return cls([0], [consistency])

    def at(self, clock: int) -> Consistency:
        """Return the consistency at a clock."""
        return self.values[bisect.bisect_right(self.begins, max(clock, 0)) - 1]

    def begin(self, clock: int) -> int:
        """Return the first clock of the consistency that is in effect at `clock`."""
        return self.begins[bisect.bisect_right(self.begins, max(clock, 0)) - 1]

    def change(self, clock: int, consistency: Consistency) -> None:
        """Set the consistency from a clock on."""
        keep = bisect.bisect_left(self.begins, clock)
        self.begins[keep:], self.values[keep:] = [clock], [consistency]


@dataclass
class ShardProgress:
    """State of a shard without its values; the same on all replicas.

    Attributes:
        rules: Consistency by clock.
        number: Number of the last record (change of the shard).
        clocks: Next clock of each worker that has pushed.
        completed: Number of complete clocks.
        num_dropped: Number of dropped pushes.
        rates: Learning rates by their first clock, ascending. Old ones are kept for late workers,
            and to recognize a repeated request for a change.
        tasks: Number of applied pushes of each task, from `oldest_task` on.
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
        """Return whether a task's push has been applied before, from any worker."""
        task, number = update
        return task < self.oldest_task or number < self.tasks.get(task, 0)

    def is_over(self, clock: int) -> bool:
        """Return whether a quorum has completed a clock, so that workers need not push for it."""
        if clock >= self.completed:
            return False
        rule = self.rules.at(clock)
        return rule.quorum is not None and rule.late == "drop"

    def clocks_of(self, members: Mapping[int, int]) -> dict[int, int]:
        """Return the clock of each worker's next push; `members` maps workers to first clocks."""
        return {worker: self.clocks.get(worker, start) for worker, start in members.items()}

    def slowest(self, members: Mapping[int, int], pushes: Sequence[Push] = ()) -> int:
        """Return the least clock of all members once `pushes` are applied.

        The result is at most the clock of the next change of the consistency.
        """
        clocks = self.clocks_of(members)
        clocks.update({worker: clock + 1 for worker, clock in pushes if worker in clocks})
        slowest = min(clocks.values(), default=self.completed)
        return min([slowest, *(b for b in self.rules.begins if b > self.completed)])

    def advance(self, record: ShardRecord) -> None:
        """Update the progress by the next record, which is one change of the shard."""
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
        """Set the learning rate from a clock on; remove the oldest above `MAX_RATES`."""
        is_last = clock > next(reversed(self.rates), BEFORE)
        self.rates[clock] = lr
        if not is_last:
            self.rates = dict(sorted(self.rates.items()))
        while len(self.rates) > MAX_RATES:
            first, second = itertools.islice(self.rates, 2)
            if second > self.completed:
                return  # the first one is still in use
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
        """Return the learning rate for a record (a change); None if the rate never changed."""
        if record.step_lr is not None or not self.rates:
            return record.step_lr
        clock = min((clock for _, clock in record.pushes), default=0)
        return next((lr for begin, lr in reversed(self.rates.items()) if begin <= clock), None)
