"""Finds averagings of gradients in recordings, and derives the steps of a training from them.

Problem: a program may not record its steps. Without steps a report can only show the whole
recording, with start-up in it.

Idea: every step ends with an averaging of gradients, and its buckets are recorded in any case. A
step lasts from the end of one averaging to the end of the next one: optimizer, data, forward,
backward.
Averagings are matched between ranks by the collectives under way beside their buckets. Groups,
channels and numbers of collectives are the same on all ranks, whichever events a ring has lost.

    buckets    ...|  1  |.............|  1  |..............|  1  |
    steps              |------ 7 ------|------- 8 --------|
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from braid.launch.observe.intervals import EventInterval

__all__ = ["averagings_of", "derived_steps"]

LOGGED = "log"  # event that `braid.log` records with the number of the step


class AveragingOf(NamedTuple):
    """Gradient buckets that one rank averaged in one backward.

    Attributes:
        number: Index of the averaging, the same on all ranks that take part in it.
        buckets: Spans of its buckets, by begin.
    """

    number: int
    buckets: tuple[EventInterval, ...]

    @property
    def end_ns(self) -> int:
        """End of the last bucket."""
        return max(bucket.end_ns for bucket in self.buckets)


def averagings_of(by_rank: Mapping[int, Sequence[EventInterval]]) -> dict[int, list[AveragingOf]]:
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
    by_rank: Mapping[int, Sequence[EventInterval]], complete: Mapping[int, bool], *, failed: bool
) -> dict[int, list[EventInterval]]:
    """Return the training steps of each rank: each averaging of gradients ends one step.

    Steps have the same numbers on all ranks: the numbers that the program logs, else a count.

    Args:
        by_rank: Events of each rank, by begin.
        complete: Whether a rank's recording has its first events. If so, the first step begins
            when the rank last did anything else before its first averaging, such as joining.
        failed: Whether the run has failed. The time after the last averaging is then an open step.
    """
    averagings = averagings_of(by_rank)
    seqs = _numbered(by_rank, averagings)
    steps: dict[int, list[EventInterval]] = {}
    for rank, rows in averagings.items():
        rank_steps = steps[rank] = []
        if not rows:
            continue
        before = [i.end_ns for i in by_rank[rank] if i.end_ns <= rows[0].buckets[0].start_ns]
        begin_ns = max(before, default=None) if complete[rank] else None
        for row in rows:
            if begin_ns is not None:
                rank_steps.append(
                    EventInterval(begin_ns, row.end_ns, "step", "step", seq=seqs[row.number])
                )
            begin_ns = row.end_ns
        last_ns = max(i.end_ns for i in by_rank[rank])
        if failed and begin_ns is not None and last_ns > begin_ns:
            seq = seqs[rows[-1].number] + 1
            rank_steps.append(EventInterval(begin_ns, last_ns, "step", "step", seq=seq, open=True))
    return steps


def _numbered(
    by_rank: Mapping[int, Sequence[EventInterval]], averagings: Mapping[int, Sequence[AveragingOf]]
) -> dict[int, int]:
    """Return the number of the step that each averaging ends, by the index of the averaging.

    Ranks that share averagings are numbered together, and start with the one that has recorded the
    earliest of them. A number is one more than the largest before it on any of its ranks.
    """
    seqs = {row.number: 0 for rows in averagings.values() for row in rows}
    for _ in averagings:  # each pass carries numbers over one more rank
        before = dict(seqs)
        for rows in averagings.values():
            for row, later in pairwise(rows):
                if later.number != row.number:
                    seqs[later.number] = max(seqs[later.number], seqs[row.number] + 1)
        if seqs == before:
            break
    shifts = _shifts(by_rank, averagings, seqs)
    everywhere = sum(shifts.values(), Counter[int]())
    shift_of = {
        row.number: _most_common(shifts[rank] or everywhere)
        for rank, rows in averagings.items()
        for row in rows
    }
    return {number: seq + shift_of[number] for number, seq in seqs.items()}


def _shifts(
    by_rank: Mapping[int, Sequence[EventInterval]],
    averagings: Mapping[int, Sequence[AveragingOf]],
    seqs: Mapping[int, int],
) -> dict[int, Counter[int]]:
    """Count, for each rank, by how much the program's numbers of steps differ from `seqs`.

    Ranks that share averagings share a counter. A program logs a step after its averaging and
    before the next one; see `braid.log`.
    """
    shifts = {rank: Counter[int]() for rank in averagings}
    first_rank: dict[int, int] = {}
    for rank, rows in averagings.items():
        if not rows:
            continue
        counter_here = shifts[rank]
        for row in rows:
            shared = shifts[first_rank.setdefault(row.number, rank)]
            if shared is not counter_here:
                shared.update(counter_here)
                shifts |= {r: shared for r, counter in shifts.items() if counter is counter_here}
                counter_here = shared
        logs = [i for i in by_rank[rank] if i.name == LOGGED]
        starts = [log.start_ns for log in logs]
        ends = [*(row.buckets[0].start_ns for row in rows[1:]), None]
        for row, end_ns in zip(rows, ends, strict=True):
            first = bisect_left(starts, row.end_ns)
            if first < len(logs) and (end_ns is None or starts[first] < end_ns):
                counter_here[logs[first].seq - seqs[row.number]] += 1
    return shifts


def _most_common(shifts: Counter[int]) -> int:
    return shifts.most_common(1)[0][0] if shifts else 0


def _groups(buckets: Iterable[EventInterval]) -> list[list[EventInterval]]:
    """Divide the bucket spans of a rank into averagings, which do not overlap."""
    groups: list[list[EventInterval]] = []
    end_ns = -1
    for bucket in buckets:
        if bucket.start_ns >= end_ns or any(b.name == bucket.name for b in groups[-1]):
            groups.append([])
        groups[-1].append(bucket)
        end_ns = max(b.end_ns for b in groups[-1])
    return groups
