"""Memory that outlives a rank: its event ring and its stack dumps, made by the launcher and handed over by descriptor.

A file would need a name, a place with room, and somebody to remove it; a memory file has none of
these, and the kernel frees it with its last user. What is worth keeping is written to the log
directory after the run.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from braid.diagnose import last_operation_end, last_step, parse_stack, testimony
from braid.errors import CommError
from braid.events import DEFAULT_CAPACITY, HEADER_BYTES, RECORD, Event, EventRing
from braid.launch.process.open_spans import OpenSpans

__all__ = ["BlackBox"]


class BlackBox:
    """What one rank leaves behind.

    Args:
        rank: Its rank.
        capacity: Number of records of the event ring.

    Attributes:
        events_fd: Descriptor of the ring's memory, to be inherited.
        stacks_fd: Descriptor that the rank dumps its stacks to, to be inherited.
    """

    def __init__(self, rank: int, capacity: int = DEFAULT_CAPACITY) -> None:
        nbytes = EventRing.nbytes_for(capacity)
        self.rank = rank
        self.events_fd = _anonymous_file(f"braid-events-{rank}")
        os.ftruncate(self.events_fd, nbytes)
        self.stacks_fd = _anonymous_file(f"braid-stacks-{rank}")
        self._map = mmap.mmap(self.events_fd, nbytes)
        self.ring = EventRing(self._map, capacity, rank=rank)
        self._open_spans = OpenSpans(self._map, self.ring)

    @property
    def has_events(self) -> bool:
        """Whether the rank recorded anything."""
        return self.ring.written > 0

    @property
    def step(self) -> int | None:
        """The last step that the rank began."""
        return last_step(self.ring)

    @property
    def stacks_size(self) -> int:
        """Bytes of stacks that the rank has dumped so far."""
        return os.fstat(self.stacks_fd).st_size

    def stacks(self, begin: int = 0) -> str:
        """What the rank dumped, from byte `begin` on."""
        return os.pread(self.stacks_fd, self.stacks_size, begin).decode(errors="replace")

    def open_spans(self) -> list[Event]:
        """What the rank is inside of, by begin; quick enough to be asked for every second."""
        return self._open_spans.look()

    def testimony(self, at_ns: int | None = None, *, gave_up: bool = False) -> str:
        """What the rank was inside of, from its spans, else from its stacks; may be empty.

        Args:
            at_ns: Moment of the fault that ended the run; now when None.
            gave_up: The rank ended because another had: what counts is the collective in which it
                noticed.
        """
        if gave_up:
            at_ns = last_operation_end(self.ring) or at_ns
        told = testimony(self.ring, at_ns)
        if told:
            return told
        stacks = parse_stack(self.stacks())
        where = next((stack.where for stack in stacks if stack.current), "")
        return f"at {where}" if where else ""

    def pieces(self) -> list[tuple[int, bytes]]:
        """All of the ring that is used, as places and bytes, for a box on another host."""
        names = HEADER_BYTES + self.ring.capacity * RECORD.size
        used = HEADER_BYTES + min(self.ring.written, self.ring.capacity) * RECORD.size
        named = names + 8 + int.from_bytes(self._map[names : names + 8], "little")
        return [(0, self._map[:used]), (names, self._map[names:named])]

    def load(self, pieces: Iterable[tuple[int, bytes]], stacks: bytes) -> None:
        """Become a copy of another box of the same capacity; the clock's offset stays.

        Raises:
            CommError: The pieces do not fit.
        """
        offset_ns, capacity = self.ring.clock_offset_ns, self.ring.capacity
        for at, data in pieces:
            if not 0 <= at <= at + len(data) <= len(self._map):
                msg = (
                    f"expected pieces of a ring of {len(self._map)} bytes, found {len(data)} at "
                    f"{at}"
                )
                raise CommError(msg)
            self._map[at : at + len(data)] = bytes(data)
        if self.ring.header[1] != capacity:
            msg = f"expected a ring of {capacity} records, found {self.ring.header[1]}"
            raise CommError(msg)
        self.ring.clock_offset_ns = offset_ns
        os.ftruncate(self.stacks_fd, 0)
        os.pwrite(self.stacks_fd, stacks, 0)

    def write_to(self, log_dir: Path) -> None:
        """Keep what there is: `events/rank{r}.ring` and `stacks/rank{r}.txt`.

        Raises:
            OSError: The directory cannot be written.
        """
        if self.has_events:
            (log_dir / "events").mkdir(exist_ok=True)
            self._write_ring(log_dir / "events" / f"rank{self.rank}.ring")
        stacks = self.stacks()
        if stacks:
            (log_dir / "stacks").mkdir(exist_ok=True)
            (log_dir / "stacks" / f"rank{self.rank}.txt").write_text(stacks)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._map.closed:
            return
        self.ring.release()
        self._map.close()
        os.close(self.events_fd)
        os.close(self.stacks_fd)

    def __enter__(self) -> BlackBox:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write_ring(self, path: Path) -> None:
        """Write the ring with a hole where no record is: most runs fill a fraction of it."""
        used = HEADER_BYTES + min(self.ring.written, self.ring.capacity) * RECORD.size
        names = HEADER_BYTES + self.ring.capacity * RECORD.size
        with path.open("wb") as file:
            file.write(self._map[:used])
            file.seek(names)
            file.write(self._map[names:])


def _anonymous_file(name: str) -> int:
    """A descriptor of memory without a name; of an unlinked temporary file where there is no such memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
