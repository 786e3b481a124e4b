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
from typing import Any

import msgspec

from braid.fusion.activities import Activity

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
        self._events: list[dict[str, Any]] = []

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
        self._events.append(
            {
                "ph": "X",
                "name": activity.name,
                "pid": self.rank,
                "tid": number,
                "ts": activity.start_ns / 1e3,
                "dur": (activity.end_ns - activity.start_ns) / 1e3,
                "args": about,
            }
        )

    def encode(self) -> bytes:
        """Return all events as JSON, for the rank that writes."""
        heads = [_named("process_name", self.rank, 0, f"rank {self.rank}")]
        heads += [_named("thread_name", self.rank, n, name) for name, n in self._threads.items()]
        return msgspec.json.encode(heads + self._events)

    def __repr__(self) -> str:
        return f"Timeline(rank {self.rank}, {len(self._events)} events)"


def write_timeline(path: Path, parts: Iterable[bytes]) -> None:
    """Write what all ranks have encoded as one file."""
    events = [event for part in parts for event in msgspec.json.decode(part)]
    path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
