"""Lines that a full disk refuses: kept within a limit, and tried again once a second."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from braid.runtime.clock import Clock

__all__ = ["MAX_BYTES", "Backlog"]

LOG = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
RETRY_S = 1.0


class Backlog:
    """Lines that are not yet in a file.

    Beyond 1 MiB, the oldest lines are dropped, except for the first: a part of it may have been
    written.

    Args:
        clock: Clock that decides when a refused write is tried again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._retry_ns: int | None = None  # time of the next try; None if no write was refused

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __bytes__(self) -> bytes:
        return b"".join(self._lines)

    def append(self, line: bytes) -> None:
        """Add a line."""
        self._lines.append(line)
        self._num_bytes += len(line)
        while self._num_bytes > MAX_BYTES and len(self._lines) > 1:
            self._num_bytes -= len(self._lines[1])
            del self._lines[1]
            self._num_dropped += 1

    def replace(self, lines: Iterable[bytes]) -> None:
        """Keep these lines instead."""
        self._lines.clear()
        self._num_bytes = 0
        for line in lines:
            self.append(line)

    def flush(self, write: Callable[[bytes], int], *, at_once: bool = False) -> None:
        """Write all lines; within a second of a refusal, only if `at_once`.

        Args:
            write: Writes bytes, and returns how many it has written.
            at_once: Whether to try also within a second of a refusal.

        Raises:
            OSError: A write was refused; the rest of the lines is kept.
        """
        if self._retry_ns is not None and self._clock.now_ns() < self._retry_ns and not at_once:
            return
        try:
            while self._lines:
                line = self._lines[0]
                num_written = write(line)
                self._num_bytes -= num_written
                if num_written < len(line):
                    self._lines[0] = line[num_written:]
                else:
                    self._lines.popleft()
        except OSError:
            self._retry_ns = self._clock.after_ns(RETRY_S)
            raise
        self._retry_ns = None

    def close(self, write: Callable[[bytes], int], name: object) -> None:
        """Try for the last time, and warn if lines of the file `name` are lost."""
        with suppress(OSError):
            self.flush(write, at_once=True)
        if num_lost := self._num_dropped + len(self._lines):
            LOG.warning("lines that could not be written to %s are lost: %d", name, num_lost)
