"""One shard on one server: carries out on tensors what `ShardState` decides.

Values of pushes are kept until they are added up, sums until the chain has them.

A gradient that is late can be corrected: g + a g g (w - w'), where w' are the values from which it
was computed, w those that it changes, and a g g stands for the curvature.

Source of the correction: S. Zheng et al., Asynchronous SGD with Delay Compensation, ICML 2017.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from braid.ps.protocol.instructions import (
    Apply,
    DropPushes,
    Instruction,
    Keep,
    Merge,
)
from braid.ps.protocol.progress import ShardRecord
from braid.ps.protocol.shard_state import ShardState
from braid.ps.storage import SparseStorage, Storage, Tensors

__all__ = ["TableShard"]


@dataclass
class TableShard:
    """A shard, its values, and what is under way.

    Attributes:
        table: Name of its table.
        number: Its number in the table.
        virtual: Virtual shard on whose chain it lies.
        state: Its decisions.
        storage: Its values.
        kept: Values of pushes, by worker and clock.
        sums: Sums of records that are not confirmed, by number.
        staleness: Records between pull and push, of the pushes of the last records.
        dropped: Pushes that came too late, of the last records.
    """

    table: str
    number: int
    virtual: int
    state: ShardState
    storage: Storage
    kept: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    sums: dict[int, Tensors] = field(default_factory=dict)
    staleness: dict[tuple[int, int], int] = field(default_factory=dict)
    dropped: set[tuple[int, int]] = field(default_factory=set)
    _pulled: dict[int, tuple[int, Tensors]] = field(default_factory=dict)  # by worker, the last
    _lr: float | None = None  # that was set last

    def carry_out(self, instructions: list[Instruction], value: Tensors = ()) -> list[Instruction]:
        """Do what concerns values; return what concerns messages.

        Args:
            instructions: Decisions of the state.
            value: Value of the push, or sum of the record, that the event brought.
        """
        rest: list[Instruction] = []
        for each in instructions:
            match each:
                case Keep(worker, clock):
                    self.kept[worker, clock] = value
                case DropPushes(pushes):
                    for push in pushes:
                        self.kept.pop(push, None)
                case Merge(record):
                    self.dropped.update(record.dropped)
                    self.sums[record.number] = self._merged(record)
                case Apply(record):
                    self._apply(record)
                case _:
                    rest.append(each)
        self.sums = {n: sums for n, sums in self.sums.items() if n > self.state.confirmed}
        return rest

    def read(self, worker: int, query: Tensors) -> tuple[Tensors, int]:
        """Return what a worker pulls, with the number of its last record."""
        values, version = self.storage.read(query), self.state.applied.number
        compensates = any(rule.compensate for rule in self.state.applied.rules.values)
        members = self.state.view.members
        self._pulled = {w: each for w, each in self._pulled.items() if w in members}
        self._pulled[worker] = version, values if compensates else ()
        return values, version

    def follow(self, record: ShardRecord, sums: Tensors, epoch: int) -> list[Instruction]:
        """Take a record of the predecessor."""
        if self.state.follows(epoch) and record.number > self.state.applied.number:
            self.sums[record.number] = sums
        return self.carry_out(self.state.record(record, epoch))

    def _apply(self, record: ShardRecord) -> None:
        """Let the optimizer step with the sum of a record, at the learning rate of its clock."""
        sums = self.sums[record.number]
        if not sums:
            return
        lr = self.state.applied.rate(record)
        if lr is not None and lr != self._lr:
            self.storage.set_lr(lr)
            self._lr = lr
        self.storage.apply(sums)

    def _merged(self, record: ShardRecord) -> Tensors:
        """Return the sum of a record's pushes, in their order."""
        values = []
        for worker, clock in record.pushes:
            value = self.kept.pop((worker, clock))
            version, pulled = self._pulled.get(worker, (record.number - 1, ()))
            self.staleness[worker, clock] = max(0, record.number - 1 - version)
            strength = self.state.decided.rules.at(clock).compensate
            values.append(self._compensated(value, pulled, strength) if strength else value)
        return self.storage.merge(values, record.scale) if values else ()

    def _compensated(self, value: Tensors, pulled: Tensors, strength: float) -> Tensors:
        """Return a late gradient corrected for what has changed since it was begun."""
        if isinstance(self.storage, SparseStorage) or not pulled:
            return value
        (grad, *has), (then,), (now,) = value, pulled, self.storage.read(())
        return (grad + strength * grad * grad * (now - then), *has)
