"""Gradient buckets: on which rank they were full last, by how much, and how often.

Problem: averagings end on all ranks at once, so durations show nobody who makes the others wait.
What tells is when each rank had a bucket full.

Idea: the span of a bucket begins in that moment. Spans of one averaging are found on all ranks by
the collectives under way beside them: their groups, channels and numbers are the same everywhere,
whichever events a ring has lost. Ranks that average with others, in another group, are looked at by
themselves.

    rank 0   bucket 1 |..................|   bucket 2 |..........|        bucket 2 is critical: full on all ranks last
    rank 1     bucket 1 |................|                bucket 2 |..|   rank 1 is behind by this: ----
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from braid.observe.intervals import Interval
from braid.observe.timeline import RankTimeline
from braid.observe.units import duration_text

__all__ = ["Averaging", "LateBucket", "averagings", "late_buckets"]

EVEN = 0.05  # of the time from averaging to averaging; ranks that are nearer to each other are not called behind
WARM_UP = 1  # averagings left out when there are enough others: the first one allocates


class LateBucket(NamedTuple):
    """One bucket in all averagings.

    Attributes:
        name: Such as `bucket 2 of 3`.
        nbytes: Its size.
        rank: That was last most often, among the averagings in which one was behind; -1 when none
        ever was.
        behind_ns: By how much that rank was behind the first one, in the median of those.
        num_behind: In how many averagings it was.
        num_critical: Averagings in which this bucket was full on all ranks last.
        num_averagings: All of them.
    """

    name: str
    nbytes: int
    rank: int
    behind_ns: int
    num_behind: int
    num_critical: int
    num_averagings: int

    def __str__(self) -> str:
        if not self.num_behind:
            return f"{self.name}: no rank was behind in {self.num_averagings} steps"
        return (
            f"{self.name}: rank {self.rank} was behind by {duration_text(self.behind_ns)} "
            f"in {self.num_behind} of {self.num_averagings} steps"
        )


class Averaging(NamedTuple):
    """One averaging of gradients.

    Attributes:
        full_ns: By name of the bucket, then by rank, when it was full.
        nbytes: By name of the bucket.
    """

    full_ns: dict[str, dict[int, int]]
    nbytes: dict[str, int]

    @property
    def ranks(self) -> frozenset[int]:
        """That have it on record."""
        return frozenset().union(*self.full_ns.values())

    @property
    def start_ns(self) -> int:
        """When the first bucket was full on the first rank."""
        return min(moment for ranks in self.full_ns.values() for moment in ranks.values())

    @property
    def critical(self) -> str:
        """The bucket that was full on all ranks last."""
        return max(self.full_ns, key=lambda name: max(self.full_ns[name].values()))


def late_buckets(timelines: Iterable[RankTimeline]) -> list[LateBucket]:
    """One row for each bucket, in order, and for each group of ranks; empty where there are none, or only one rank."""
    by_first: dict[int, list[Averaging]] = defaultdict(list)
    for averaging in averagings(timelines):
        by_first[min(averaging.ranks)].append(averaging)
    rows = [row for _, found in sorted(by_first.items()) for row in _rows(found)]
    return sorted(rows, key=lambda row: _place(row.name))


def _rows(found: list[Averaging]) -> list[LateBucket]:
    """Of ranks that average together."""
    found = found[WARM_UP:] if len(found) > WARM_UP + 1 else found
    starts = [averaging.start_ns for averaging in found]
    period = median(b - a for a, b in pairwise(starts)) if len(starts) > 1 else 0
    behind: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    seen: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for averaging in found:
        for name, ranks in averaging.full_ns.items():
            seen[name] += 1
            sizes[name] = averaging.nbytes[name]
            last = max(ranks, key=lambda rank: (ranks[rank], -rank))
            late_ns = ranks[last] - min(ranks.values())
            if late_ns > EVEN * period:
                behind[name][last].append(late_ns)
    critical = Counter(averaging.critical for averaging in found)
    rows = []
    for name in seen:
        by_rank = behind[name]
        rank = max(by_rank, key=lambda r: (len(by_rank[r]), -r), default=-1)
        own = by_rank[rank] if by_rank else []
        typical = round(median(own)) if own else 0
        rows.append(
            LateBucket(name, sizes[name], rank, typical, len(own), critical[name], seen[name])
        )
    return rows


def averagings(timelines: Iterable[RankTimeline]) -> list[Averaging]:
    """Averagings that more than one rank has on record, in order of time."""
    known: dict[
        tuple[int, int, int], int
    ] = {}  # group, channel and number of a collective -> averaging
    table: list[Averaging] = []
    for timeline in timelines:
        calls = timeline.of("collective")
        starts = [call.start_ns for call in calls]
        for group in _groups(timeline.of("bucket")):
            end_ns = max(bucket.end_ns for bucket in group)
            first, last = bisect_left(starts, group[0].start_ns), bisect_right(starts, end_ns)
            keys = [(call.group, call.channel, call.seq) for call in calls[first:last]]
            number = next((known[key] for key in keys if key in known), len(table))
            if number == len(table):
                table.append(Averaging({}, {}))
            for key in keys:
                known.setdefault(key, number)
            for bucket in group:
                table[number].full_ns.setdefault(bucket.name, {})[timeline.rank] = bucket.start_ns
                table[number].nbytes[bucket.name] = bucket.nbytes
    shared = [averaging for averaging in table if len(averaging.ranks) > 1]
    return sorted(shared, key=lambda averaging: averaging.start_ns)


def _groups(buckets: Sequence[Interval]) -> list[list[Interval]]:
    """Spans of one rank by averaging: the next one begins when all of the last have ended."""
    groups: list[list[Interval]] = []
    end_ns = -1
    for bucket in buckets:
        if bucket.start_ns >= end_ns or any(b.name == bucket.name for b in groups[-1]):
            groups.append([])
        groups[-1].append(bucket)
        end_ns = max(b.end_ns for b in groups[-1])
    return groups


def _place(name: str) -> tuple[int, int]:
    number, count = map(int, re.findall(r"\d+", name))
    return count, number
