"""Writes the launcher's log of a run; `braid.runtime.diagnose.run_events` has the lines."""

from __future__ import annotations

import fcntl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from braid.runtime.closing import Closing
from braid.runtime.diagnose.run_events import EVENTS_FILE, RunEvent

__all__ = ["EventLog"]


class EventLog(Closing):
    """Appends events to a file of the run's directory, on which it holds a shared lock.

    The kernel releases the lock however the launcher ends, so readers know whether more can come.
    Lines that a full disk refuses are kept, and written with the next one.

    Args:
        run_directory: Directory of the run. The file is made with its first line.
    """

    def __init__(self, run_directory: Path) -> None:
        self._path = run_directory / EVENTS_FILE
        self._file: BinaryIO | None = None
        self._unwritten = b""

    def append(self, kind: Any, **values: Any) -> None:
        """Append an event with the current time.

        Args:
            kind: Kind of the event; see `RunEvent`.
            values: Other fields of `RunEvent`.

        Raises:
            OSError: The file cannot be written.
        """
        event = RunEvent(round(time.time(), 4), kind, **values)
        self._unwritten += msgspec.json.encode(event) + b"\n"
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            with suppress(OSError):  # file systems without locks
                fcntl.flock(self._file, fcntl.LOCK_SH)
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
