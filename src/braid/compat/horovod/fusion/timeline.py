"""Timeline of every tensor in the engine, on every rank, for Chrome's trace viewer or Perfetto.

    negotiate   submitted here, until all ranks have submitted it
    queue       until it is its turn
    copy in, transfer, copy out

One process per rank, one thread per name. The times are those of each rank's clock: ranks of one
host share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from braid.compat.horovod.fusion.activities import Activity
from braid.runtime.trace_format import Event, complete, metadata, write

__all__ = ["Timeline", "write_timeline"]

CYCLES = "cycles"


class Timeline:
    """Events of one rank.

    Args:
        rank: Global rank.
        mark_cycles: Whether to record each exchange as well.
    """

    def __init__(self, rank: int, *, mark_cycles: bool = False) -> None:
        self.rank = rank
        self._mark_cycles = mark_cycles
        self._threads: dict[str, int] = {}
        self._events: list[Event] = []

    def cycle(self, start_ns: int, end_ns: int) -> None:
        """Record an exchange."""
        if self._mark_cycles:
            self._add(CYCLES, Activity("exchange", start_ns, end_ns), {})

    def operation(
        self,
        name: str,
        kind: str,
        *,
        submitted_ns: int,
        agreed_ns: int,
        activities: Sequence[Activity],
        what: str,
    ) -> None:
        """Record the activities of one tensor.

        Args:
            name: Name of the operation.
            kind: Kind of the operation.
            submitted_ns: Time at which this rank submitted it; 0 if it stood in.
            agreed_ns: Time at which all ranks had submitted it.
            activities: Activities of its batch.
            what: Dtype and shape of the tensor.
        """
        about = {"kind": kind, "tensor": what}
        if submitted_ns:
            self._add(name, Activity(f"negotiate {kind}", submitted_ns, agreed_ns), about)
        if activities:
            self._add(name, Activity("queue", agreed_ns, activities[0].start_ns), {})
        for activity in activities:
            self._add(name, activity, about)

    def _add(self, thread: str, activity: Activity, about: dict[str, str]) -> None:
        number = self._threads.setdefault(thread, len(self._threads))
        start_us, duration_us = activity.start_ns / 1e3, (activity.end_ns - activity.start_ns) / 1e3
        self._events.append(
            complete(activity.name, self.rank, number, start_us, duration_us, args=about)
        )

    def encode(self) -> bytes:
        """Return all events as JSON, for the rank that writes."""
        heads = [metadata("process_name", self.rank, 0, name=f"rank {self.rank}")]
        for name, number in self._threads.items():
            heads.append(metadata("thread_name", self.rank, number, name=name))
        return msgspec.json.encode(heads + self._events)

    def __repr__(self) -> str:
        return f"Timeline(rank {self.rank}, {len(self._events)} events)"


def write_timeline(path: Path, parts: Iterable[bytes]) -> None:
    """Write what all ranks have encoded as one file."""
    events = [event for part in parts for event in msgspec.json.decode(part)]
    with path.open("wb") as file:
        write(file, events)
