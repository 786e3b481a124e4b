"""Trace format of https://ui.perfetto.dev and chrome://tracing; only this module writes it.

A process is a rank; a thread is a track of the rank. Events of one track nest or are disjoint.

Source: Google, "Trace Event Format", 2016: events X (complete), i (instant), s t f (flow), M
(metadata), microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

import msgspec

__all__ = ["Event", "complete", "metadata", "write"]

Event = dict[str, object]


def complete(
    name: str, rank: int, track: int | str, start_us: float, duration_us: float, **more: object
) -> Event:
    """Return a complete event: a span of one track.

    Args:
        name: Text of the bar.
        rank: Global rank.
        track: Number or name of the track.
        start_us: Begin, in microseconds.
        duration_us: Duration, in microseconds.
        more: Further fields of the format, such as `cat` and `args`.
    """
    event: Event = {"ph": "X", "name": name, "pid": rank, "tid": track}
    return {**event, "ts": start_us, "dur": duration_us, **more}


def metadata(kind: str, rank: int, track: int, **args: object) -> Event:
    """Return an event of `kind`, such as `thread_name`, that names or sorts a rank or a track."""
    return {"ph": "M", "pid": rank, "tid": track, "name": kind, "args": args}


def write(file: BinaryIO, events: Iterable[Event], **head: object) -> None:
    """Write a trace event by event, so that the whole text is never in memory.

    Args:
        file: Open file.
        events: Events of all ranks.
        head: Fields of the trace besides its events.

    Raises:
        OSError: The file cannot be written.
    """
    encoder = msgspec.json.Encoder()
    opening = encoder.encode({"displayTimeUnit": "ms", **head})
    file.write(opening[:-1] + b',"traceEvents":[\n')
    separator = b""
    for event in events:
        file.write(separator + encoder.encode(event))
        separator = b",\n"
    file.write(b"\n]}\n")
