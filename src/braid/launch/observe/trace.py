"""Writes the recording of all ranks as a trace for https://ui.perfetto.dev or chrome://tracing.

The format requires that events of one track nest or are disjoint. Buckets and collectives of
several channels overlap, so every kind of event gets several tracks if needed. A wait is on the
track of the collective that it blocks.

    rank 0   phases               |step                                             |
                                  |data|forward   |backward            |optimizer   |
             buckets                                |bucket 1 of 2   |
             buckets 2                                    |bucket 2 of 2|
             channel 5            all_reduce        |  |wait|        | ----.
    rank 1   channel 5            all_reduce                   |     | <---'  arrow to the last rank

A large trace is compressed; both viewers can read it. `trace_format` writes the events.
"""

from __future__ import annotations

import gzip
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from braid._version import __version__
from braid.launch.observe.intervals import EventInterval, lanes
from braid.launch.observe.run_directory import Run
from braid.launch.observe.timeline import RankTimeline
from braid.runtime.trace_format import Event, complete, metadata, write

__all__ = ["trace_events", "write_trace"]

LARGE = 100_000  # events; some 20 MB of text
COLORS = {  # names that chrome://tracing reserves: green, orange, blue, grey
    "step": "grey",
    "phase": "thread_state_running",
    "bucket": "rail_load",
    "collective": "thread_state_runnable",
    "call": "thread_state_runnable",
    "wait": "thread_state_iowait",
    "instant": "black",
}
ORDER = {"step": 0, "phase": 0, "instant": 0, "bucket": 1, "call": 2}  # of tracks
CATEGORIES = {"phase": "compute", "bucket": "transfer", "collective": "transfer"}


def write_trace(run: Run, path: Path) -> Path:
    """Write the trace of a run.

    Args:
        run: Run to trace.
        path: Path of the file, such as `trace.json`.

    Returns:
        Path of the file: `path`, or `path` with `.gz` appended for a large trace.

    Raises:
        OSError: The file cannot be written.
    """
    timelines = run.timelines
    if sum(len(timeline.intervals) for timeline in timelines) > LARGE:
        path = path.with_name(path.name + ".gz")
    part = path.with_name(path.name + ".part")
    head: dict[str, object] = {
        "otherData": {
            "command": run.command_line,
            "braid": __version__,
            "clock": "microseconds since the first event of any rank",
        },
    }
    try:
        with part.open("wb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=4, mtime=0) as packed:
                    write(cast("BinaryIO", packed), trace_events(timelines), **head)
            else:
                write(file, trace_events(timelines), **head)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def trace_events(timelines: Sequence[RankTimeline]) -> Iterator[Event]:
    """Yield the events of all ranks in the format of a trace."""
    meetings: dict[tuple[object, ...], list[tuple[int, int, int]]] = defaultdict(list)
    for timeline in timelines:
        rank = timeline.rank
        yield metadata("process_name", rank, 0, name=f"rank {rank}")
        yield metadata("process_sort_index", rank, 0, sort_index=rank)
        seen: Counter[tuple[object, ...]] = Counter()
        for tid, (title, members) in enumerate(_tracks(timeline), start=1):
            yield metadata("thread_name", rank, tid, name=title)
            yield metadata("thread_sort_index", rank, tid, sort_index=tid)
            for member in members:
                yield _event(rank, tid, member)
                is_queue = member.role == "call" and not member.group
                if member.role in {"collective", "call"} and not is_queue:
                    name = member.name if member.role == "collective" else "call"
                    key = (name, member.group, member.channel, member.seq)
                    meeting = (*key, seen[key])
                    meetings[meeting].append((member.start_ns, rank, tid))
                    seen[key] += 1
    yield from _arrows(meetings)


def _tracks(timeline: RankTimeline) -> Iterator[tuple[str, list[EventInterval]]]:
    """Yield the titles and events of the rank's tracks, from top to bottom."""
    families: dict[tuple[int, int], list[EventInterval]] = defaultdict(list)
    operations: dict[int, set[str]] = defaultdict(set)
    for i in timeline.intervals:
        if i.role == "collective":
            operations[i.channel].add(i.name)
        order = ORDER.get(i.role, 3)
        families[order, i.channel if order == 3 else 0].append(i)
    for (order, channel), members in sorted(families.items()):
        title = ("phases", "buckets", "calls", f"channel {channel}")[order]
        if order == 3 and len(operations[channel]) == 1:
            title += f": {next(iter(operations[channel]))}"
        for index, lane in enumerate(lanes(members, nest=order in {0, 3})):
            yield f"{title} ({index + 1})" if index else title, lane


def _event(rank: int, tid: int, i: EventInterval) -> Event:
    args: dict[str, object] = {"seq": i.seq}
    if i.role in {"collective", "wait"}:
        args["channel"] = i.channel
    if i.nbytes:
        args["bytes"] = i.nbytes
    if i.site:
        args["called at"] = i.site
    if i.open:
        args["unfinished"] = "had not ended at the end of the run"
    name = f"{i.name} {i.seq}" if i.role == "step" else i.name
    event = complete(
        f"{name} (unfinished)" if i.open else name,
        rank,
        tid,
        i.start_ns / 1000,
        i.dur_ns / 1000,
        cat=CATEGORIES.get(i.role, i.role),
        cname="terrible" if i.open else COLORS[i.role],
        args=args,
    )
    if i.role == "instant":
        del event["dur"]
        event.update(ph="i", s="t")
    return event


def _arrows(
    meetings: dict[tuple[object, ...], list[tuple[int, int, int]]],
) -> Iterator[Event]:
    """Yield an arrow for each collective, from the rank that began first to the last one."""
    for number, (key, places) in enumerate(meetings.items(), start=1):
        if len(places) < 2:
            continue
        places.sort()
        for index, (start_ns, rank, tid) in enumerate(places):
            arrow: Event = {
                "ph": "s" if index == 0 else "f" if index == len(places) - 1 else "t",
                "id": number,
                "name": "same call" if key[0] == "call" else "same collective",
                "cat": "flow",
                "pid": rank,
                "tid": tid,
                "ts": start_ns / 1000,
            }
            if arrow["ph"] == "f":
                arrow["bp"] = "e"  # bind to the enclosing slice, not to the next one
            yield arrow
