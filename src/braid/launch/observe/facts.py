"""Summarizes timelines in three sentences: the slowest rank, the longest wait, the slowest step.

The steps of all ranks are equally long, because fast ranks wait for slow ones. Ranks are therefore
compared by their own work: step time without waits. A rank is late in a phase if its own work there
exceeds the work of every other rank in the same phase of the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from braid.launch.observe.buckets import late_buckets
from braid.launch.observe.operations import bucket_waits, operations
from braid.launch.observe.timeline import RankTimeline, StepKey, StepTime
from braid.runtime.diagnose.block import rank_list
from braid.runtime.text import bytes_text, duration_text, percent_text

__all__ = ["by_step", "facts", "slowest_step"]

EVEN = 0.05  # relative difference of own work below which ranks are called equally fast
OFTEN = 0.5  # share of the steps in which a rank must be behind to be named
LATE = 0.1  # share of the step below which a lateness explains nothing
WARM_UP = 1  # number of steps that are ignored if possible: the first one allocates


def facts(timelines: Sequence[RankTimeline]) -> list[str]:
    """Return up to three sentences: on the slowest rank, the longest wait and the slowest step."""
    waits = _late_bucket(timelines) or _longest_wait(timelines)
    sentences = [_slowest_rank(timelines), waits, _slowest_step(timelines)]
    return [sentence for sentence in sentences if sentence]


def by_step(timelines: Sequence[RankTimeline]) -> dict[StepKey, dict[int, StepTime]]:
    """Return the finished steps that all ranks have recorded, as step -> rank -> times.

    Steps are in order of time; ranks without any steps are ignored.
    """
    ranks = [timeline for timeline in timelines if timeline.steps]
    table: dict[StepKey, dict[int, StepTime]] = {}
    for timeline in ranks:
        for step in timeline.steps:
            if not step.open:
                table.setdefault(step.key, {})[timeline.rank] = step
    whole = [(key, row) for key, row in table.items() if len(row) == len(ranks)]
    return dict(sorted(whole, key=lambda item: min(s.start_ns for s in item[1].values())))


def slowest_step(steps: Mapping[StepKey, Mapping[int, StepTime]]) -> StepKey | None:
    """Return the step that took longest, without the first one if possible; None without steps."""
    keys = list(steps)
    keys = keys[WARM_UP:] if len(keys) > WARM_UP + 1 else keys
    return max(keys, key=lambda key: _lasted_ns(steps[key]), default=None)


def _slowest_rank(timelines: Sequence[RankTimeline]) -> str:
    steps = by_step(timelines)
    keys = list(steps)[WARM_UP:] if len(steps) > WARM_UP + 1 else list(steps)
    if not keys:
        return ""
    busy = {rank: median(steps[key][rank].busy_ns for key in keys) for rank in steps[keys[0]]}
    if len(busy) == 1:
        (only,) = busy
        return f"rank {only} needed {duration_text(busy[only])} per step (median of {len(keys)})"
    slowest = max(busy, key=lambda rank: (busy[rank], -rank))
    others = median(value for rank, value in busy.items() if rank != slowest)
    if busy[slowest] <= others * (1 + EVEN):
        return (
            f"{len(busy)} ranks are equally fast: {duration_text(others)} of own work per step, "
            f"within {percent_text(EVEN)}"
        )
    return (
        f"rank {slowest} is the slowest: {duration_text(busy[slowest])} of own work per step, "
        f"{percent_text(busy[slowest] / others - 1)} more than {_other_ranks(busy, slowest)} "
        f"({duration_text(others)})"
    )


def _late_bucket(timelines: Sequence[RankTimeline]) -> str:
    """Name the rank that often makes other ranks wait for the last bucket; empty if none does."""
    rows = late_buckets(timelines)
    if not rows:
        return ""
    critical = max(rows, key=lambda row: row.num_critical)
    often = critical.num_behind >= OFTEN * critical.num_averagings and critical.is_significant
    return f"{critical}, and the other ranks waited" if often else ""


def _longest_wait(timelines: Sequence[RankTimeline]) -> str:
    buckets = [bucket for bucket in bucket_waits(timelines) if bucket.wait_ns]
    if buckets:
        first = buckets[0]
        most = max(first.by_rank, key=lambda rank: (first.by_rank[rank], -rank))
        share = first.wait_ns / sum(bucket.wait_ns for bucket in buckets)
        text = (
            f"ranks waited longest for {first.name} ({bytes_text(first.nbytes)}): "
            f"{duration_text(first.wait_ns)} in all"
        )
        if len(buckets) > 1:
            text += f", {percent_text(share)} of the waiting for buckets"
        if len(timelines) > 1:
            text += f", {percent_text(first.by_rank[most] / first.wait_ns)} of it on rank {most}"
        return text
    calls = sorted(operations(timelines), key=lambda o: -o.wait_share * o.total_ns)
    if not calls or not calls[0].wait_share:
        return ""
    first_call = calls[0]
    waited = first_call.wait_share * first_call.total_ns
    called = f" called at {first_call.site}" if first_call.site else ""
    return f"ranks waited longest in {first_call.name}{called}: {duration_text(waited)} in all"


def _slowest_step(timelines: Sequence[RankTimeline]) -> str:
    steps = by_step(timelines)
    key = slowest_step(steps)
    if key is None or len(steps) < 2:
        return ""
    lasted = _lasted_ns(steps[key])
    usual = median(_lasted_ns(row) for row in steps.values())
    if lasted < usual * (1 + EVEN):
        return (
            f"steps are equally long: the longest took {duration_text(lasted)}, the median "
            f"{duration_text(usual)}"
        )
    text = (
        f"step {key.seq} took longest: {duration_text(lasted)}, the median is "
        f"{duration_text(usual)}"
    )
    reason = _reason(key, steps)
    return f"{text}; {reason}" if reason else text


def _reason(key: StepKey, steps: Mapping[StepKey, Mapping[int, StepTime]]) -> str:
    """Name a rank that was late in a phase, else a phase that took all ranks longer than usual."""
    row = steps[key]
    lasted = _lasted_ns(row)
    names = {name for step in row.values() for name in step.phases}
    late = max(
        (
            (step.phases.get(name, 0) - _median_without(row, rank, name), -rank, name)
            for rank, step in row.items()
            for name in sorted(names)
        ),
        default=(0, 0, ""),
    )
    if len(row) > 1 and late[0] > LATE * lasted:
        where = "between steps before" if late[2] == "between steps" else f"in {late[2]} of"
        return f"rank {-late[1]} was {duration_text(late[0])} late {where} step {key.seq}"
    longer = max(
        (
            (median(step.phases.get(name, 0) for step in row.values()) - _usual(name, steps), name)
            for name in sorted(names - {"between steps"})
        ),
        default=(0, ""),
    )
    if longer[0] > LATE * lasted:
        subject = "all ranks" if len(row) > 1 else f"rank {next(iter(row))}"
        return f"{subject} needed {duration_text(longer[0])} more than usual in {longer[1]}"
    return "" if names - {"between steps"} else _late_in_all(key, row)


def _late_in_all(key: StepKey, row: Mapping[int, StepTime]) -> str:
    """Name the rank with much longer own work in the step than any other rank, if there is one."""
    by_work = sorted(row.values(), key=lambda step: step.busy_ns)
    if len(row) < 2 or by_work[-1].busy_ns - by_work[-2].busy_ns <= LATE * _lasted_ns(row):
        return ""
    rank = next(rank for rank, step in row.items() if step is by_work[-1])
    late = duration_text(by_work[-1].busy_ns - by_work[-2].busy_ns)
    return f"rank {rank} worked {late} longer than any other in step {key.seq}"


def _usual(name: str, steps: Mapping[StepKey, Mapping[int, StepTime]]) -> float:
    return median(step.phases.get(name, 0) for row in steps.values() for step in row.values())


def _median_without(row: Mapping[int, StepTime], rank: int, name: str) -> float:
    others = [step.phases.get(name, 0) for other, step in row.items() if other != rank]
    return median(others) if others else 0.0


def _other_ranks(seconds: Mapping[int, float], slowest: int) -> str:
    text = rank_list(rank for rank in seconds if rank != slowest)
    return text if len(seconds) == 2 else f"the median of {text}"


def _lasted_ns(row: Mapping[int, StepTime]) -> int:
    return max(step.dur_ns for step in row.values())
