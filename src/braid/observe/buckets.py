"""Determines on which rank each gradient bucket was full last, by how much, and how often.

Problem: an averaging ends on all ranks at once, so durations do not show which rank makes all other
ranks wait. The moments at which the ranks have a bucket full do.

Idea: the span of a bucket begins when the bucket is full. Spans of one averaging are matched
between ranks by the collectives under way beside them. Groups, channels and numbers of collectives
are the same on all ranks, whichever events a ring has lost. Each group of ranks is computed
separately.

    rank 0   bucket 1 |..................|   bucket 2 |..........|
    rank 1     bucket 1 |................|                bucket 2 |..|

    bucket 2 is critical: full on all ranks last. Rank 1 is behind by the distance of both begins.
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

EVEN = 0.05  # share of the time between averagings below which no rank is called behind
WARM_UP = 1  # number of averagings that are ignored if possible: the first one allocates


class LateBucket(NamedTuple):
    """Lateness of one bucket over all averagings.

    Attributes:
        name: Name of the bucket, such as `bucket 2 of 3`.
        nbytes: Size of the bucket.
        rank: Rank that was behind most often; -1 if no rank ever was.
        behind_ns: Median time by which that rank was behind the first rank.
        num_behind: Number of averagings in which that rank was behind.
        num_critical: Number of averagings in which this bucket was full on all ranks last.
        num_averagings: Number of averagings.
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
        full_ns: Time at which each bucket was full, by name of the bucket, then by rank.
        nbytes: Size of each bucket, by name.
    """

    full_ns: dict[str, dict[int, int]]
    nbytes: dict[str, int]

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks that have recorded the averaging."""
        return frozenset().union(*self.full_ns.values())

    @property
    def start_ns(self) -> int:
        """Time at which the first bucket was full on the first rank."""
        return min(moment for ranks in self.full_ns.values() for moment in ranks.values())

    @property
    def critical(self) -> str:
        """Name of the bucket that was full on all ranks last."""
        return max(self.full_ns, key=lambda name: max(self.full_ns[name].values()))


def late_buckets(timelines: Iterable[RankTimeline]) -> list[LateBucket]:
    """Return one row for each bucket and group of ranks, in order; empty with only one rank."""
    by_first: dict[int, list[Averaging]] = defaultdict(list)
    for averaging in averagings(timelines):
        by_first[min(averaging.ranks)].append(averaging)
    rows = [row for _, together in sorted(by_first.items()) for row in _rows(together)]
    return sorted(rows, key=lambda row: _place(row.name))


def _rows(together: list[Averaging]) -> list[LateBucket]:
    """Return the rows of ranks that average together."""
    together = together[WARM_UP:] if len(together) > WARM_UP + 1 else together
    starts = [averaging.start_ns for averaging in together]
    period = median(b - a for a, b in pairwise(starts)) if len(starts) > 1 else 0
    behind: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    seen: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for averaging in together:
        for name, ranks in averaging.full_ns.items():
            seen[name] += 1
            sizes[name] = averaging.nbytes[name]
            last = max(ranks, key=lambda rank: (ranks[rank], -rank))
            late_ns = ranks[last] - min(ranks.values())
            if late_ns > EVEN * period:
                behind[name][last].append(late_ns)
    critical = Counter(averaging.critical for averaging in together)
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
    """Return the averagings that more than one rank has recorded, in order of time."""
    # (group, channel and number of a collective) -> index of the averaging
    known: dict[tuple[int, int, int], int] = {}
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
    """Divide the bucket spans of a rank into averagings, which do not overlap."""
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
