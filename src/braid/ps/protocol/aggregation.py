"""The aggregation of a shard's kept pushes into records, under the consistency of their clocks.

    pushes                              next record
    of a clock, staleness 0             all of them, once all live workers or a quorum have pushed
    after their clock is complete       one push, added or dropped
    staleness above 0                   one push, in order of arrival
    of a task, applied before           one dropped push

Heads with the same pushes, progress and members decide on the same records.

Sources: see `consistency`.
"""

from __future__ import annotations

from collections.abc import Mapping

from braid.ps.consistency import Consistency
from braid.ps.protocol.kept_pushes import KeptPushes
from braid.ps.protocol.progress import Push, ShardProgress, ShardRecord

__all__ = ["new_record", "next_record"]


def next_record(
    kept: KeptPushes, decided: ShardProgress, members: Mapping[int, int]
) -> ShardRecord | None:
    """Return the next record (change) that the kept pushes allow, or None.

    Args:
        kept: Pushes that are in no record yet.
        decided: Progress of all earlier records.
        members: First clock of each live worker.
    """
    context = kept, decided, members
    completed, rules = decided.completed, decided.rules
    for worker, clock in kept.eligible:
        alone = ((worker, clock),)
        rule = rules.at(clock)
        by_clock = rule.by_clock
        is_late = by_clock and clock < completed
        if (is_late or not by_clock) and kept.repeated(alone, decided):
            return new_record(*context, dropped=alone)
        if is_late and rule.late == "drop":
            return new_record(*context, dropped=alone)
        if is_late:
            return new_record(*context, alone, scale=_scale(rule, _needed(rule, clock, members)))
        if not by_clock and completed >= rules.begin(clock):
            return new_record(*context, alone, scale=_scale(rule, len(members)))
    rule = rules.at(completed)
    if not rule.by_clock:
        return new_record(*context) if decided.slowest(members) > completed else None
    begin = min(members.values(), default=completed)
    if begin > completed:  # all members began at a later clock
        return new_record(*context, completed=begin)
    workers = sorted([worker for worker, clock in kept.eligible if clock == completed])
    if not workers or not len(members.keys() & workers) >= _needed(rule, completed, members) > 0:
        return None
    arrived = [(worker, completed) for worker in workers]
    dropped = kept.repeated(arrived, decided)
    pushes = tuple([push for push in arrived if push not in dropped])
    scale = _scale(rule, max(1, len(pushes)))
    return new_record(*context, pushes, dropped=dropped, scale=scale, completed=completed + 1)


def new_record(
    kept: KeptPushes,
    decided: ShardProgress,
    members: Mapping[int, int],
    pushes: tuple[Push, ...] = (),
    *,
    dropped: tuple[Push, ...] = (),
    scale: float = 1.0,
    completed: int | None = None,
) -> ShardRecord:
    """Return a record (change) of these pushes; see `next_record` and `ShardRecord`.

    When None, `completed` is computed from the workers' clocks.
    """
    if completed is None:
        completed = decided.completed
        if not decided.rules.at(completed).by_clock:
            completed = max(completed, decided.slowest(members, pushes))
    updates, oldest, lr = kept.details(pushes)
    return ShardRecord(
        number=decided.number + 1,
        pushes=pushes,
        scale=scale,
        dropped=dropped,
        completed=completed,
        updates=updates,
        oldest_task=oldest,
        step_lr=lr,
    )


def _needed(rule: Consistency, clock: int, members: Mapping[int, int]) -> int:
    """Return the number of live workers whose push completes a clock."""
    count = len([start for start in members.values() if start <= clock])
    return count if rule.quorum is None else min(rule.quorum, count)


def _scale(rule: Consistency, count: int) -> float:
    return 1.0 / count if rule.aggregate == "mean" else 1.0
