"""Converts event rings to timelines on one clock, and computes where the time of each rank went.

Problem: the steps of all ranks in a synchronous job are equally long, because fast ranks wait for
slow ones. Durations therefore show nothing. The division of a rank's steps does:

    wait        blocked until another rank arrives (`wait` spans)
    transfer    inside collectives without waiting
    compute     the rest of the step: forward, backward, optimizer, data

A collective that was started from a hook is open while backward goes on computing, so its span is
not its cost. Only its *foreground* counts: the part after the last begin or end of something else
on the rank.

    backward     |-----------------------------------------|     . under way
    bucket 1            |.....................=====|             = foreground, less the waits inside
    bucket 2                                  |=========|
                                              ^ the rank began something else

Clocks: `t_ns` plus the ring's offset is the launcher's clock; the first event of the run is time 0.
An open span lasts until the last event of any rank, and the foreground of an open collective counts
as waiting. If the run failed, the last step of every rank counts as unfinished, because an
exception closes the step. So does a last collective that no other event follows.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from braid.launch.observe.averagings import derived_steps
from braid.launch.observe.intervals import Cover, EventInterval
from braid.runtime.events import EventRing
from braid.types import Shares

__all__ = ["RankTimeline", "StepKey", "StepTime", "read_timelines", "shares"]

CALL = re.compile(r"(call|serve)\(.*, (to|for) rank \d+\)|queue\(.*\)", re.DOTALL)
COLLECTIVE = re.compile(r"\w+\(.*\)", re.DOTALL)
# roles of events which show that the rank itself did something
START_UP = "init("  # what `braid.init` does before the program goes on
WORK = frozenset({"step", "phase", "bucket", "collective"})
BUCKET = re.compile(r"bucket \d+ of \d+")


class StepKey(NamedTuple):
    """Identity of a step on all ranks: its number, and how often that number occurred before."""

    repeat: int
    seq: int


class StepTime(NamedTuple):
    """Times of the phases of one training step on one rank.

    Attributes:
        key: Identity of the step.
        start_ns: Begin of the step.
        end_ns: End of the step.
        wait_ns: Time blocked by other ranks.
        transfer_ns: Time in collectives, without waits.
        phases: Time of each outermost phase, without waits; `between steps` is the time since the
            previous step.
        open: Whether the step did not end.
    """

    key: StepKey
    start_ns: int
    end_ns: int
    wait_ns: int
    transfer_ns: int
    phases: dict[str, int]
    open: bool

    @property
    def dur_ns(self) -> int:
        """Duration of the step."""
        return self.end_ns - self.start_ns

    @property
    def busy_ns(self) -> int:
        """Own work of the rank: duration without waits."""
        return self.dur_ns - self.wait_ns

    @property
    def compute_ns(self) -> int:
        """Time outside of collectives."""
        return self.busy_ns - self.transfer_ns


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """Recording of one rank.

    Attributes:
        rank: Number of the rank.
        intervals: Events by begin; of two that begin together, the longer one first.
        num_lost: Number of older records that were overwritten.
        waits: Moments at which the rank was blocked.
        transfers: Moments at which the rank was in a collective without being blocked.
        steps: Steps in order of time.
    """

    rank: int
    intervals: tuple[EventInterval, ...]
    num_lost: int
    waits: Cover
    transfers: Cover
    steps: tuple[StepTime, ...]

    def of(self, *roles: str) -> list[EventInterval]:
        """Return the events with one of `roles`."""
        return [i for i in self.intervals if i.role in roles]

    @property
    def span_ns(self) -> tuple[int, int]:
        """Begin and end of the recording."""
        if not self.intervals:
            return 0, 0
        return self.intervals[0].start_ns, max(i.end_ns for i in self.intervals)

    @property
    def windows(self) -> list[tuple[int, int]]:
        """Intervals over which shares of time are computed, as (begin, end).

        These are the finished steps, else the unfinished steps, else the recording after `init`.
        """
        finished = [(s.start_ns, s.end_ns) for s in self.steps if not s.open]
        start_ns, end_ns = self.span_ns
        joined_ns = [i.end_ns for i in self.intervals if i.name.startswith(START_UP)]
        rest = (min(max(joined_ns, default=start_ns), end_ns), end_ns)
        return finished or [(s.start_ns, s.end_ns) for s in self.steps] or [rest]


def read_timelines(rings: Iterable[EventRing], *, failed: bool = False) -> tuple[RankTimeline, ...]:
    """Return the timelines of all ranks on one clock, by rank.

    Args:
        rings: Event rings of the ranks.
        failed: Whether the run has failed.
    """
    tails = [(ring, ring.tail(), ring.clock_offset_ns) for ring in rings]
    begins = [event.t_ns + offset for _, events, offset in tails for event in events]
    origin_ns = min(begins, default=0)
    last_ns = max(
        (
            event.t_ns + offset + (0 if event.open else event.dur_ns)
            for _, events, offset in tails
            for event in events
        ),
        default=0,
    )
    recordings: dict[int, tuple[EventRing, list[EventInterval]]] = {}
    for ring, events, offset in tails:
        name = ring.name
        intervals = []
        for event in events:
            start_ns = event.t_ns + offset - origin_ns
            end_ns = last_ns - origin_ns if event.open else start_ns + event.dur_ns
            kind = name(event.kind)
            intervals.append(
                EventInterval(
                    start_ns,
                    end_ns,
                    kind,
                    _role(kind, instant=event.dur_ns == 0),
                    event.channel,
                    event.seq,
                    event.nbytes,
                    name(event.site) if event.site else "",
                    event.open,
                    event.group,
                )
            )
        recordings[ring.rank] = (ring, sorted(intervals, key=_by_begin))
    if not any(i.role == "step" for _, intervals in recordings.values() for i in intervals):
        complete = {rank: ring.written <= ring.capacity for rank, (ring, _) in recordings.items()}
        rows = {rank: intervals for rank, (_, intervals) in recordings.items()}
        for rank, steps in derived_steps(rows, complete, failed=failed).items():
            rows[rank] += steps
            rows[rank].sort(key=_by_begin)
    return tuple(
        _timeline(ring, intervals, failed=failed)
        for _, (ring, intervals) in sorted(recordings.items())
    )


def shares(timeline: RankTimeline) -> Shares:
    """Return the division of the rank's time, over all its steps."""
    total = wait = transfer = 0
    for start_ns, end_ns in timeline.windows:
        total += end_ns - start_ns
        wait += timeline.waits.within(start_ns, end_ns)
        transfer += timeline.transfers.within(start_ns, end_ns)
    if not total:
        return Shares(0.0, 0.0, 0.0)
    return Shares((total - wait - transfer) / total, wait / total, transfer / total)


def foreground(intervals: Sequence[EventInterval]) -> list[tuple[int, int, bool]]:
    """Return (begin, end, open) of the foreground of each collective.

    The foreground is the part in which the rank did nothing else.

    It begins at the last begin or end of other work on the rank.
    """
    elsewhere = sorted(
        moment
        for i in intervals
        if i.role in WORK
        for moment in ((i.start_ns, i.end_ns) if i.role in {"step", "phase"} else (i.start_ns,))
    )
    parts = []
    for i in intervals:
        if i.role == "collective":
            last = bisect_left(elsewhere, i.end_ns) - 1
            parts.append((max(i.start_ns, elsewhere[last] if last >= 0 else 0), i.end_ns, i.open))
    return parts


def _role(kind: str, *, instant: bool) -> str:
    if instant:
        return "instant"
    if kind in {"step", "wait"}:
        return kind
    if kind.startswith(START_UP):
        return "phase"
    if CALL.fullmatch(kind):
        return "call"
    if COLLECTIVE.fullmatch(kind):
        return "collective"
    return "bucket" if BUCKET.fullmatch(kind) else "phase"


def _by_begin(interval: EventInterval) -> tuple[int, int]:
    return interval.start_ns, -interval.end_ns


def _timeline(ring: EventRing, intervals: list[EventInterval], *, failed: bool) -> RankTimeline:
    inside = foreground(intervals)
    if failed and (last := [i for i in intervals if i.role in WORK][-1:]) and inside:
        # the last collective of a failed rank ended by an error, which records no wait
        inside[-1] = (*inside[-1][:2], inside[-1][2] or last[0].role == "collective")
    waits = Cover(
        [(i.start_ns, i.end_ns) for i in intervals if i.role == "wait"]
        + [(start, end) for start, end, open_ in inside if open_]
    )
    transfers = Cover((start, end) for start, end, _ in inside).minus(waits)
    steps = _step_times(intervals, waits, transfers)
    if failed and steps:
        steps = (*steps[:-1], steps[-1]._replace(open=True))
    return RankTimeline(
        rank=ring.rank,
        intervals=tuple(intervals),
        num_lost=max(0, ring.written - ring.capacity),
        waits=waits,
        transfers=transfers,
        steps=steps,
    )


def _step_times(
    intervals: Sequence[EventInterval], waits: Cover, transfers: Cover
) -> tuple[StepTime, ...]:
    steps = [i for i in intervals if i.role == "step"]
    starts = [step.start_ns for step in steps]
    phases = _outermost_phases(intervals, steps, starts, waits)
    seen: Counter[int] = Counter()
    times = []
    for index, step in enumerate(steps):
        if index:
            gap = (steps[index - 1].end_ns, step.start_ns)
            phases[index]["between steps"] = max(0, gap[1] - gap[0]) - waits.within(*gap)
        times.append(
            StepTime(
                StepKey(seen[step.seq], step.seq),
                step.start_ns,
                step.end_ns,
                waits.within(step.start_ns, step.end_ns),
                transfers.within(step.start_ns, step.end_ns),
                phases[index],
                step.open,
            )
        )
        seen[step.seq] += 1
    return tuple(times)


def _outermost_phases(
    intervals: Sequence[EventInterval],
    steps: Sequence[EventInterval],
    starts: list[int],
    waits: Cover,
) -> list[dict[str, int]]:
    """Return the time of the outermost phases of each step."""
    phases: list[dict[str, int]] = [{} for _ in steps]
    covered_ns = 0
    for i in intervals:
        index = bisect_right(starts, i.start_ns) - 1
        if i.role != "phase" or index < 0 or i.end_ns > steps[index].end_ns:
            continue
        if i.start_ns >= covered_ns:
            covered_ns = i.end_ns
            own_ns = i.dur_ns - waits.within(i.start_ns, i.end_ns)
            phases[index][i.name] = phases[index].get(i.name, 0) + own_ns
    return phases
