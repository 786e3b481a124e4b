"""Determines on which rank each gradient bucket was full last, by how much, and how often.

Problem: an averaging ends on all ranks at the same time, so durations do not show which rank makes
all other ranks wait. The times at which a bucket became full on each rank do.

Idea: the span of a bucket begins when the bucket is full, and `averagings` matches the spans of one
averaging between ranks. Each group of ranks is computed separately. With two ranks, one of them is
behind in every averaging, as one side of a coin is up in every toss: a rank is called behind only
if it is so more often than chance explains.

    rank 0   bucket 1 |..................|   bucket 2 |..........|
    rank 1     bucket 1 |................|                bucket 2 |..|

    bucket 2 is critical: full on all ranks last. Rank 1 is behind by the distance of both begins.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from braid.launch.observe.averagings import averagings_of
from braid.launch.observe.timeline import RankTimeline
from braid.runtime.text import duration_text

__all__ = ["Averaging", "LateBucket", "averagings", "late_buckets", "more_often_than"]

EVEN = 0.05  # share of the time between averagings below which no rank is called behind
UNLIKELY = 0.02  # probability of a chance result below which it is called none
WARM_UP = 1  # number of averagings that are ignored if possible: the first one allocates


class LateBucket(NamedTuple):
    """Lateness of one gradient bucket over all averagings of gradients.

    Attributes:
        name: Name of the bucket, such as `bucket 2 of 3`.
        nbytes: Size of the bucket.
        rank: Rank that was behind most often; -1 if no rank ever was.
        behind_ns: Median time by which that rank was behind the first rank.
        num_behind: Number of averagings in which that rank was behind.
        num_critical: Number of averagings in which this bucket was full on all ranks last.
        num_averagings: Number of averagings.
        chance: Probability that any of equally fast ranks is behind as often as that rank.
    """

    name: str
    nbytes: int
    rank: int
    behind_ns: int
    num_behind: int
    num_critical: int
    num_averagings: int
    chance: float = 1.0

    @property
    def is_significant(self) -> bool:
        """Whether the rank was behind more often than chance explains for equally fast ranks."""
        return self.chance < UNLIKELY

    def __str__(self) -> str:
        if not self.num_behind:
            return f"{self.name}: no rank was behind in {self.num_averagings} steps"
        return (
            f"{self.name}: rank {self.rank} was behind by {duration_text(self.behind_ns)} "
            f"in {self.num_behind} of {self.num_averagings} steps"
        )


class Averaging(NamedTuple):
    """One averaging of gradients in a recorded step.

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
    """Return the lateness of each bucket of each group of ranks; empty with only one rank."""
    by_first: dict[int, list[Averaging]] = defaultdict(list)
    for averaging in averagings(timelines):
        by_first[min(averaging.ranks)].append(averaging)
    rows = [row for _, together in sorted(by_first.items()) for row in _rows(together)]
    return sorted(rows, key=lambda row: _place(row.name))


def more_often_than(count: int, num_trials: int, chance: float) -> float:
    """Return the probability of `count` or more hits in independent trials (binomial tail).

    `chance` is the probability of a hit in one trial.
    """
    log_chance, log_rest = math.log(chance), math.log1p(-chance) if chance < 1 else -math.inf
    total = 0.0
    for hits in range(count, num_trials + 1):
        ways = math.lgamma(num_trials + 1) - math.lgamma(hits + 1)
        ways -= math.lgamma(num_trials - hits + 1)
        rest = (num_trials - hits) * log_rest if hits < num_trials else 0.0
        total += math.exp(ways + hits * log_chance + rest)
    return min(1.0, total)


def _chance(num_behind: int, num_uneven: int, num_ranks: int) -> float:
    """Probability that one of equally fast ranks is behind so often, when some rank was."""
    if not num_behind:
        return 1.0
    return min(1.0, num_ranks * more_often_than(num_behind, num_uneven, 1 / num_ranks))


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
    num_ranks = max(len(averaging.ranks) for averaging in together)
    rows = []
    for name in seen:
        by_rank = behind[name]
        rank = max(by_rank, key=lambda r: (len(by_rank[r]), -r), default=-1)
        times = by_rank[rank] if by_rank else []
        typical = round(median(times)) if times else 0
        rows.append(
            LateBucket(
                name,
                sizes[name],
                rank,
                typical,
                len(times),
                critical[name],
                seen[name],
                _chance(len(times), sum(map(len, by_rank.values())), num_ranks),
            )
        )
    return rows


def averagings(timelines: Iterable[RankTimeline]) -> list[Averaging]:
    """Return the averagings that more than one rank has recorded, in order of time."""
    table: dict[int, Averaging] = defaultdict(lambda: Averaging({}, {}))
    for rank, rows in averagings_of({t.rank: t.intervals for t in timelines}).items():
        for row in rows:
            for bucket in row.buckets:
                averaging = table[row.number]
                averaging.full_ns.setdefault(bucket.name, {})[rank] = bucket.start_ns
                averaging.nbytes[bucket.name] = bucket.nbytes
    shared = [averaging for averaging in table.values() if len(averaging.ranks) > 1]
    return sorted(shared, key=lambda averaging: averaging.start_ns)


def _place(name: str) -> tuple[int, int]:
    number, count = map(int, re.findall(r"\d+", name))
    return count, number
