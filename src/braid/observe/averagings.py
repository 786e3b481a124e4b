"""Finds averagings of gradients in recordings, and derives the steps of a training from them.

Problem: a program that records no steps of its own still has steps. Without them a report can only
show the whole recording, with start-up in it.

Idea: every step ends with an averaging of gradients, whose buckets are recorded anyway. A step
lasts from the end of one averaging to the end of the next one: optimizer, data, forward, backward.
Averagings are matched between ranks by the collectives under way beside their buckets. Groups,
channels and numbers of collectives are the same on all ranks, whichever events a ring has lost.

    buckets    ...|  1  |.............|  1  |..............|  1  |
    steps              |------ 7 ------|------- 8 --------|
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from braid.observe.intervals import Interval

__all__ = ["AveragingOf", "averagings_of", "derived_steps"]

LOGGED = "log"  # event that `braid.log` records with the number of the step


class AveragingOf(NamedTuple):
    """The buckets of one averaging on one rank.

    Attributes:
        number: Index of the averaging, the same on all ranks that take part in it.
        buckets: Spans of its buckets, by begin.
    """

    number: int
    buckets: tuple[Interval, ...]

    @property
    def end_ns(self) -> int:
        """End of the last bucket."""
        return max(bucket.end_ns for bucket in self.buckets)


def averagings_of(by_rank: Mapping[int, Sequence[Interval]]) -> dict[int, list[AveragingOf]]:
    """Return the averagings of each rank, in order of time.

    Args:
        by_rank: Events of each rank, by begin.
    """
    # (group, channel and number of a collective) -> index of the averaging
    known: dict[tuple[int, int, int], int] = {}
    count = 0
    table: dict[int, list[AveragingOf]] = {}
    for rank, intervals in by_rank.items():
        calls = [i for i in intervals if i.role == "collective"]
        starts = [call.start_ns for call in calls]
        rows = []
        for buckets in _groups(i for i in intervals if i.role == "bucket"):
            end_ns = max(bucket.end_ns for bucket in buckets)
            first, last = bisect_left(starts, buckets[0].start_ns), bisect_right(starts, end_ns)
            keys = [(call.group, call.channel, call.seq) for call in calls[first:last]]
            number = next((known[key] for key in keys if key in known), count)
            count = max(count, number + 1)
            for key in keys:
                known.setdefault(key, number)
            rows.append(AveragingOf(number, tuple(buckets)))
        table[rank] = rows
    return table


def derived_steps(
    by_rank: Mapping[int, Sequence[Interval]], complete: Mapping[int, bool], *, failed: bool
) -> dict[int, list[Interval]]:
    """Return steps that end with the averagings of each rank, numbered alike on all ranks.

    Steps have the numbers with which the program logs them, if it does; else they are counted.

    Args:
        by_rank: Events of each rank, by begin.
        complete: Whether a rank's recording has its first events. If so, the first step begins
            when the rank last did anything else before its first averaging, such as joining.
        failed: Whether the run has failed: what follows the last averaging is then an open step.
    """
    averagings = averagings_of(by_rank)
    members: dict[int, list[int]] = {}
    for rank, rows in averagings.items():
        for row in rows:
            members.setdefault(row.number, []).append(rank)
    seqs: dict[int, int] = {}
    seen: Counter[int] = Counter()  # by the first rank of the group
    for number in sorted(members):
        seqs[number] = seen[min(members[number])]
        seen[min(members[number])] += 1
    shift = _shift(by_rank, averagings, seqs)
    seqs = {number: seq + shift for number, seq in seqs.items()}
    steps: dict[int, list[Interval]] = {}
    for rank, rows in averagings.items():
        own = steps[rank] = []
        if not rows:
            continue
        before = [i.end_ns for i in by_rank[rank] if i.end_ns <= rows[0].buckets[0].start_ns]
        begin_ns = max(before, default=None) if complete[rank] else None
        for row in rows:
            if begin_ns is not None:
                own.append(Interval(begin_ns, row.end_ns, "step", "step", seq=seqs[row.number]))
            begin_ns = row.end_ns
        last_ns = max(i.end_ns for i in by_rank[rank])
        if failed and begin_ns is not None and last_ns > begin_ns:
            seq = seqs[rows[-1].number] + 1
            own.append(Interval(begin_ns, last_ns, "step", "step", seq=seq, open=True))
    return steps


def _shift(
    by_rank: Mapping[int, Sequence[Interval]],
    averagings: Mapping[int, Sequence[AveragingOf]],
    seqs: Mapping[int, int],
) -> int:
    """Return what the program's numbers of steps have more than these; see `braid.log`.

    A program logs a step after its averaging and before the next one.
    """
    shifts: Counter[int] = Counter()
    for rank, rows in averagings.items():
        if not rows:
            continue
        logs = [i for i in by_rank[rank] if i.name == LOGGED]
        starts = [log.start_ns for log in logs]
        ends = [*(row.buckets[0].start_ns for row in rows[1:]), None]
        for row, end_ns in zip(rows, ends, strict=True):
            first = bisect_left(starts, row.end_ns)
            if first < len(logs) and (end_ns is None or starts[first] < end_ns):
                shifts[logs[first].seq - seqs[row.number]] += 1
    return shifts.most_common(1)[0][0] if shifts else 0


def _groups(buckets: Iterable[Interval]) -> list[list[Interval]]:
    """Divide the bucket spans of a rank into averagings, which do not overlap."""
    groups: list[list[Interval]] = []
    end_ns = -1
    for bucket in buckets:
        if bucket.start_ns >= end_ns or any(b.name == bucket.name for b in groups[-1]):
            groups.append([])
        groups[-1].append(bucket)
        end_ns = max(b.end_ns for b in groups[-1])
    return groups
