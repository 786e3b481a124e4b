"""Timeline of every tensor in the engine, on every rank, for Chrome's trace viewer or Perfetto.

    negotiate   from submission on this rank until all ranks have submitted it
    queue       until its batch begins
    copy in, transfer, copy out

One process per rank, one thread per name. Times are from each rank's clock, which ranks of one host
share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from braid.comm import Group
from braid.compat.horovod.fusion.entry import TensorTableEntry
from braid.runtime import trace_format

__all__ = ["Timeline"]

CYCLES = "cycles"


class _Activity(NamedTuple):
    """Named time span on the rank's clock, such as "copy in"."""

    name: str
    start_ns: int
    end_ns: int


class _Recording:
    """Events of one rank since the start of its timeline."""

    def __init__(self, rank: int, *, mark_cycles: bool) -> None:
        self.rank = rank
        self.mark_cycles = mark_cycles
        self._threads: dict[str, int] = {}
        self._events: list[trace_format.Event] = []

    def operation(
        self, entry: TensorTableEntry, agreed_ns: int, activities: Sequence[_Activity]
    ) -> None:
        """Record the activities of one tensor."""
        request = entry.request
        about = {"kind": request.kind, "tensor": f"{request.dtype}{list(request.shape)}"}
        if not entry.is_stand_in:
            negotiation = _Activity(f"negotiate {request.kind}", entry.submitted_ns, agreed_ns)
            self.add(request.name, negotiation, about)
        if activities:
            self.add(request.name, _Activity("queue", agreed_ns, activities[0].start_ns), {})
        for activity in activities:
            self.add(request.name, activity, about)

    def add(self, thread: str, activity: _Activity, about: dict[str, str]) -> None:
        """Record an activity in the row of a thread."""
        number = self._threads.setdefault(thread, len(self._threads))
        start_us, duration_us = activity.start_ns / 1e3, (activity.end_ns - activity.start_ns) / 1e3
        self._events.append(
            trace_format.complete(
                activity.name, self.rank, number, start_us, duration_us, args=about
            )
        )

    def encode(self) -> bytes:
        """Return all events as JSON, for the first rank, which writes them."""
        heads = [trace_format.metadata("process_name", self.rank, 0, name=f"rank {self.rank}")]
        for name, number in self._threads.items():
            heads.append(trace_format.metadata("thread_name", self.rank, number, name=name))
        return msgspec.json.encode(heads + self._events)


class Timeline:
    """Timeline of an engine: recorded on each rank after `start`, written by the first rank.

    Args:
        group: Ranks of the engine.

    Attributes:
        path_at_end: Path to write to when the engine ends; not written when None.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._now_ns = group.context.clock.now_ns
        self._recording: _Recording | None = None
        self._activities: list[_Activity] = []  # of the batch that is being carried out
        self.path_at_end: Path | None = None

    def start(self, *, mark_cycles: bool = False) -> None:
        """Begin to record operations, and exchanges between ranks if `mark_cycles`."""
        self._recording = _Recording(self._group.context.rank, mark_cycles=mark_cycles)

    def cycle(self, start_ns: int, end_ns: int) -> None:
        """Record an exchange of requests between ranks."""
        recording = self._recording
        if recording is not None and recording.mark_cycles:
            recording.add(CYCLES, _Activity("exchange", start_ns, end_ns), {})

    @contextlib.contextmanager
    def batch(self, entries: Sequence[TensorTableEntry], agreed_ns: int) -> Iterator[None]:
        """Record the activities inside the context for each tensor of a batch.

        Args:
            entries: Entries of the batch.
            agreed_ns: Time at which all ranks had submitted the batch's requests.
        """
        recording, self._activities = self._recording, []
        yield
        if recording is not None:
            for entry in entries:
                recording.operation(entry, agreed_ns, self._activities)

    @contextlib.contextmanager
    def span(self, name: str, nbytes: int) -> Iterator[None]:
        """Record the code in the context as one activity with this name.

        The span is also recorded in the rank's event trace, even if the timeline is off.
        """
        start_ns = self._now_ns()
        with self._group.context.events.span(name, nbytes=nbytes):
            yield
        self._activities.append(_Activity(name, start_ns, self._now_ns()))

    def write(self, path: Path | None) -> str:
        """Stop recording, gather the recordings of all ranks, and write them on the first rank.

        Args:
            path: Path on the first rank; nothing is written when None.

        Returns:
            Reason why the file cannot be written; empty on success.
        """
        recording, self._recording = self._recording, None
        parts = self._group.objects.gather(b"[]" if recording is None else recording.encode())
        if parts is not None and path is not None:
            events = [event for part in parts for event in msgspec.json.decode(part)]
            try:
                with path.open("wb") as file:
                    trace_format.write(file, events)
            except (OSError, ValueError) as error:  # ValueError for a path with a null byte
                return f"timeline cannot be written to {str(path)!r}: {error}"
        return ""
