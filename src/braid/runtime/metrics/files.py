"""Files of logged numbers: one for each rank, one JSON object per line, in the run's directory.

Every rank has a separate file, so logging needs no communication: if one rank logs alone, or some
ranks log other steps, no rank waits. Readers of the files compute the averages.

The writer of a file holds a shared lock on it (`flock`), which the kernel releases however the
process ends. So a reader knows whether more can come, with and without braid's launcher.
"""

from __future__ import annotations

import fcntl
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from braid.runtime.clock import Clock
from braid.runtime.closing import Closing
from braid.runtime.metrics.backlog import Backlog
from braid.runtime.metrics.rows import Row

__all__ = ["FOLDER", "MetricsFiles", "has_writer"]

FOLDER = "metrics"


class MetricsFiles(Closing):
    """Writer of rows to `metrics/rank<r>.jsonl` in a run's directory; a context manager.

    Each row is written immediately, so a file can be read during the run. Rows that a full disk
    refuses are kept in a `Backlog`, and written with a later row of the rank or at the end.

    Args:
        run_directory: Directory of the run. Files are created with their first row.
        clock: Clock that decides when a refused write is tried again.
    """

    def __init__(self, run_directory: Path, clock: Clock) -> None:
        self._folder = run_directory / FOLDER
        self._files: dict[int, BinaryIO] = {}
        self._clock = clock
        self._unwritten: dict[int, Backlog] = {}
        self._closers = ExitStack()

    def append(self, rank: int, row: Row) -> None:
        """Append a row of a rank.

        Raises:
            OSError: The file cannot be written; not raised again within a second.
        """
        unwritten = self._unwritten.get(rank)
        if unwritten is None:
            unwritten = self._unwritten[rank] = Backlog(self._clock)
        unwritten.append(msgspec.json.encode(row) + b"\n")
        unwritten.flush(partial(self._write, rank))

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.jsonl"

    def _write(self, rank: int, data: bytes) -> int:
        file = self._files.get(rank)
        if file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._closers.enter_context(self._path(rank).open("ab", buffering=0))
            with suppress(OSError):  # file systems without locks
                fcntl.flock(file, fcntl.LOCK_SH)
            self._files[rank] = file
        return file.write(data)

    def close(self) -> None:
        """Write what was refused, if this is possible now, and close all files. Idempotent."""
        for rank, unwritten in self._unwritten.items():
            unwritten.close(partial(self._write, rank), self._path(rank))
        self._unwritten.clear()
        self._files.clear()
        self._closers.close()


def has_writer(path: Path) -> bool:
    """Return whether a process writes a file of `MetricsFiles`; True if this is unknown."""
    try:
        with path.open("rb") as file:  # closing the file releases the lock
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
