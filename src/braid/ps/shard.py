"""One shard on one server: carries out the decisions of `ShardState` on tensors.

Values of pushes are kept until they are summed; sums are kept until the whole chain has them. A
server sums and steps after it has sent its answers, or when it needs the sums or the values.

A late gradient g can be corrected: g + a g g (w - w'), where w' are the values from which it was
computed, w the current values, and a g g approximates the curvature.

Source of the correction: S. Zheng et al., Asynchronous SGD with Delay Compensation, ICML 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from braid.ps.messages import ShardSnapshot
from braid.ps.protocol.instructions import Apply, Instruction, Merge
from braid.ps.protocol.progress import ShardRecord
from braid.ps.protocol.shard_state import ShardState
from braid.ps.storage import SparseStorage, Storage, Tensors
from braid.runtime.tensor_buffers import as_buffers

__all__ = ["TableShard"]


@dataclass
class TableShard:
    """A shard of a table: its state machine, its values and its unfinished pushes.

    Attributes:
        table: Name of the table.
        number: Number of the shard in the table.
        virtual: Virtual shard that determines the shard's chain.
        state: State machine that decides.
        storage: Values of the shard.
        kept: Values of pushes that are in no record yet, by worker and clock.
        sums: Sums of records (changes) that are not confirmed, by number.
        staleness: Number of records between the pull and the push, for recently summed pushes.
        dropped: Recent pushes that were dropped because they came too late.
        due: Instructions for the next `step`.
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
    due: list[Merge | Apply] = field(default_factory=list)
    _pulled: dict[int, tuple[int, Tensors]] = field(default_factory=dict)  # by worker, the last
    _lr: float | None = None  # that was set last

    def step(self) -> None:
        """Sum and apply the records (changes) that are due; drop the sums that all servers have."""
        due, self.due = self.due, []
        for instruction in due:
            record = instruction.record
            if isinstance(instruction, Apply):
                self._apply(record)
            else:
                self.dropped.update(record.dropped)
                self.sums[record.number] = self._merged(record)
        self.sums = {n: sums for n, sums in self.sums.items() if n > self.state.confirmed}

    def read(self, worker: int, query: Tensors) -> tuple[Tensors, int]:
        """Return the values for a worker's pull, and the number of the last applied change."""
        self.step()
        values, version = self.storage.read(query), self.state.applied.number
        compensates = any(rule.compensate for rule in self.state.applied.rules.values)
        members = self.state.view.members
        self._pulled = {w: pulled for w, pulled in self._pulled.items() if w in members}
        self._pulled[worker] = version, values if compensates else ()
        return values, version

    def follow(self, record: ShardRecord, sums: Tensors, epoch: int) -> list[Instruction]:
        """Store a record (a change) and its sum from the previous copy; return instructions."""
        if self.state.follows(epoch) and record.number > self.state.applied.number:
            self.sums[record.number] = sums
        return self.state.record(record, epoch)

    def snapshot(self, server: int) -> tuple[ShardSnapshot, list[memoryview]]:
        """Return the message with the whole state, and its buffers, for a server that joins."""
        self.step()
        state = self.storage.export()
        specs, buffers = as_buffers(list(state.values()))
        since, progress = self.state.view.joining[server], self.state.applied.copy()
        message = ShardSnapshot(since, self.table, self.number, progress, list(state), specs)
        return message, buffers

    def install(self, message: ShardSnapshot, tensors: Sequence[torch.Tensor]) -> list[Instruction]:
        """Begin with the state of the previous copy; return instructions."""
        self.storage.load(dict(zip(message.names, tensors, strict=True)))
        return self.state.install(message.progress, message.since)

    def _apply(self, record: ShardRecord) -> None:
        """Step the optimizer with the sum of a record, at the learning rate of its clock."""
        sums = self.sums[record.number]
        if not sums:
            return
        lr = self.state.applied.rate(record)
        if lr is not None and lr != self._lr:
            self.storage.set_lr(lr)
            self._lr = lr
        self.storage.apply(sums)

    def _merged(self, record: ShardRecord) -> Tensors:
        """Return the sum of a record's pushes, added in their order."""
        values = []
        for worker, clock in record.pushes:
            value = self.kept.pop((worker, clock))
            version, pulled = self._pulled.get(worker, (record.number - 1, ()))
            self.staleness[worker, clock] = max(0, record.number - 1 - version)
            strength = self.state.decided.rules.at(clock).compensate
            values.append(self._compensated(value, pulled, strength) if strength else value)
        return self.storage.merge(values, record.scale) if values else ()

    def _compensated(self, value: Tensors, pulled: Tensors, strength: float) -> Tensors:
        """Return a late gradient, corrected for the change of the values since its pull."""
        if isinstance(self.storage, SparseStorage) or not pulled:
            return value
        (grad, *has), (then,), (now,) = value, pulled, self.storage.read(())
        return (grad + strength * grad * grad * (now - then), *has)
