"""Memory for the events and stack dumps of a rank, which the launcher can read after its death.

The launcher creates anonymous memory files and passes their descriptors to the rank. Such a file
needs no name and no disk space, and the kernel frees it with its last user. The contents are
written to the log directory after the run.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from braid.errors import CommError
from braid.launch.process.open_spans import OpenSpans
from braid.runtime.closing import Closing
from braid.runtime.diagnose.last_events import last_events, last_operation_end, last_step
from braid.runtime.diagnose.tracebacks import parse_stack
from braid.runtime.events import DEFAULT_CAPACITY, HEADER_BYTES, RECORD, Event, EventRing

__all__ = ["BlackBox"]


class BlackBox(Closing):
    """Event ring and stack dumps of one rank, in memory that outlives the rank.

    Args:
        rank: Rank that writes to the box.
        capacity: Number of records of the event ring.

    Attributes:
        events_fd: Descriptor of the ring's memory, inherited by the rank.
        stacks_fd: Descriptor to which the rank dumps its stacks, inherited by the rank.
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
        """Whether the rank recorded any event."""
        return self.ring.written > 0

    @property
    def step(self) -> int | None:
        """Number of the last training step that the rank began; None if there was none."""
        return last_step(self.ring)

    @property
    def stacks_size(self) -> int:
        """Number of bytes of stacks that the rank has dumped so far."""
        return os.fstat(self.stacks_fd).st_size

    def stacks(self, begin: int = 0) -> str:
        """Return the stacks that the rank has dumped, from byte `begin` on."""
        return os.pread(self.stacks_fd, self.stacks_size, begin).decode(errors="replace")

    def open_spans(self) -> list[Event]:
        """Return the open spans of the rank in the order of their begin; cheap enough to poll."""
        return self._open_spans.look()

    def last_events(self, at_ns: int | None = None, *, gave_up: bool = False) -> str:
        """Describe the rank's last activity, from its spans or else its stacks; may be empty.

        Args:
            at_ns: Time of the fault that ended the run; now when None.
            gave_up: Whether the rank ended because of another rank. The description is then of the
                collective in which the rank noticed the failure.
        """
        if gave_up:
            at_ns = last_operation_end(self.ring) or at_ns
        text = last_events(self.ring, at_ns)
        if text:
            return text
        stacks = parse_stack(self.stacks())
        where = next((stack.where for stack in stacks if stack.current), "")
        return f"at {where}" if where else ""

    def pieces(self) -> list[tuple[int, bytes]]:
        """Return the used parts of the ring as (offset, bytes), to copy the box to another host."""
        names = HEADER_BYTES + self.ring.capacity * RECORD.size
        used = HEADER_BYTES + min(self.ring.written, self.ring.capacity) * RECORD.size
        named = names + 8 + int.from_bytes(self._map[names : names + 8], "little")
        return [(0, self._map[:used]), (names, self._map[names:named])]

    def load(self, pieces: Iterable[tuple[int, bytes]], stacks: bytes) -> None:
        """Replace the contents by the contents of another box; the clock offset is kept.

        Args:
            pieces: Result of `pieces` of a box of the same capacity.
            stacks: Stack dumps of the other box.

        Raises:
            CommError: The pieces do not fit into this box.
        """
        offset_ns, capacity = self.ring.clock_offset_ns, self.ring.capacity
        for at, data in pieces:
            if not 0 <= at <= at + len(data) <= len(self._map):
                msg = (
                    f"the {len(data)} bytes at offset {at} exceed an event ring of "
                    f"{len(self._map)} bytes"
                )
                raise CommError(msg)
            self._map[at : at + len(data)] = bytes(data)
        if self.ring.header[1] != capacity:
            msg = f"the event ring has {self.ring.header[1]} records instead of {capacity}"
            raise CommError(msg)
        self.ring.clock_offset_ns = offset_ns
        os.ftruncate(self.stacks_fd, 0)
        os.pwrite(self.stacks_fd, stacks, 0)

    def write_to(self, log_dir: Path) -> None:
        """Write the contents, if any, to `events/rank{r}.ring` and `stacks/rank{r}.txt`.

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
        """Release the memory. Idempotent."""
        if self._map.closed:
            return
        self.ring.release()
        self._map.close()
        os.close(self.events_fd)
        os.close(self.stacks_fd)

    def _write_ring(self, path: Path) -> None:
        """Write the ring as a sparse file: most runs use a fraction of its records."""
        used = HEADER_BYTES + min(self.ring.written, self.ring.capacity) * RECORD.size
        names = HEADER_BYTES + self.ring.capacity * RECORD.size
        with path.open("wb") as file:
            file.write(self._map[:used])
            file.seek(names)
            file.write(self._map[names:])


def _anonymous_file(name: str) -> int:
    """Return a descriptor of anonymous memory, or of an unlinked temporary file without memfd."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
