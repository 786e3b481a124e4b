"""Sums up collectives by operation: call site, duration, and the share of it that was waiting."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from braid.launch.observe.intervals import EventInterval
from braid.launch.observe.timeline import RankTimeline

__all__ = ["OperationSummary", "bucket_waits", "operations", "percentile"]


class OperationSummary(NamedTuple):
    """All calls of one operation, by all ranks.

    Attributes:
        name: Name of the operation, such as `all_reduce(float32[1024], avg)`.
        site: Most frequent call site; may be empty.
        calls: Number of calls by all ranks.
        nbytes: Number of bytes of all calls.
        total_ns: Duration of all calls.
        p50_ns: Median duration of a call.
        p95_ns: Duration that one call in twenty exceeds.
        wait_share: Fraction of the duration that was waiting for other ranks.
        num_open: Number of calls that did not end.
    """

    name: str
    site: str
    calls: int
    nbytes: int
    total_ns: int
    p50_ns: int
    p95_ns: int
    wait_share: float
    num_open: int


class BucketWait(NamedTuple):
    """Time for which ranks were blocked by one gradient bucket."""

    name: str
    nbytes: int
    wait_ns: int
    by_rank: dict[int, int]


@dataclass
class _Calls:
    durations: list[int] = field(default_factory=list)
    nbytes: int = 0
    wait_ns: int = 0
    num_open: int = 0
    sites: Counter[str] = field(default_factory=Counter)


def operations(timelines: Iterable[RankTimeline]) -> list[OperationSummary]:
    """Return one row for each operation, the most expensive first."""
    table: dict[str, _Calls] = defaultdict(_Calls)
    for timeline in timelines:
        for call, wait_ns in waits_by_collective(timeline):
            row = table[call.name]
            row.durations.append(call.dur_ns)
            row.nbytes += call.nbytes
            row.wait_ns += wait_ns
            row.num_open += call.open
            row.sites[call.site] += 1
    rows = [
        OperationSummary(
            name,
            row.sites.most_common(1)[0][0],
            len(row.durations),
            row.nbytes,
            total := sum(row.durations),
            percentile(row.durations, 0.5),
            percentile(row.durations, 0.95),
            row.wait_ns / total if total else 0.0,
            row.num_open,
        )
        for name, row in table.items()
    ]
    return sorted(rows, key=lambda row: (-row.total_ns, row.name))


def bucket_waits(timelines: Iterable[RankTimeline]) -> list[BucketWait]:
    """Return the waiting time for each bucket, the longest first."""
    waits: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    for timeline in timelines:
        buckets = timeline.of("bucket")
        starts = [bucket.start_ns for bucket in buckets]
        for call, wait_ns in waits_by_collective(timeline):
            index = bisect_right(starts, call.start_ns) - 1
            if index >= 0 and _carries(buckets[index], call):
                waits[buckets[index].name, call.nbytes][timeline.rank] += wait_ns
    rows = [
        BucketWait(name, nbytes, sum(ranks.values()), dict(ranks))
        for (name, nbytes), ranks in waits.items()
    ]
    return sorted(rows, key=lambda bucket: (-bucket.wait_ns, bucket.name))


def waits_by_collective(timeline: RankTimeline) -> list[tuple[EventInterval, int]]:
    """Return every collective of a rank with the time for which the rank was blocked in it.

    A wait belongs to the collective that was in progress on the wait's channel; collectives of one
    channel run in order.
    """
    calls = timeline.of("collective")
    by_channel: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        by_channel[call.channel].append(index)
    starts = {
        channel: [calls[index].start_ns for index in indices]
        for channel, indices in by_channel.items()
    }
    waited = [0] * len(calls)
    for wait in timeline.of("wait"):
        place = bisect_right(starts.get(wait.channel, []), wait.start_ns) - 1
        if place >= 0 and wait.end_ns <= calls[index := by_channel[wait.channel][place]].end_ns:
            waited[index] += wait.dur_ns
    return list(zip(calls, waited, strict=True))


def percentile(values: Sequence[int], fraction: float) -> int:
    """Return the smallest value that `fraction` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else 0


def _carries(bucket: EventInterval, call: EventInterval) -> bool:
    return bucket.nbytes == call.nbytes and call.end_ns <= bucket.end_ns
