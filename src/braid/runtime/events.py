"""Black box: the last events of each rank, readable after it has died.

Problem: a killed rank cannot report its last actions, and a hanging rank does not. Logs are lost in
buffers; profilers write their file at the end.

Idea: every rank writes fixed records of eight 64-bit words into a ring in shared memory that the
*launcher* created and passed by file descriptor. The pages outlive the writer, so the launcher can
read the last events of a dead rank and, after the run, build the trace of all ranks from the same
memory. Nothing is formatted or flushed while the program runs: beginning and ending a span takes
about one microsecond.

    +--------------------+---------------------------------+--------------------------------+
    | header, 4 KiB      | records: capacity x 64 bytes    | names: append-only table       |
    +--------------------+---------------------------------+--------------------------------+

A span is written when it *begins*, with `dur_ns` = `OPEN`; its end sets the duration. So open
records are the spans that a rank is (or was) inside of. Texts (kinds, call sites) are stored once
in the name table and referred to by a 63-bit digest. Collectives also use `NameTable` to describe
their operation to peers.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import msgspec

from braid.errors import ConfigError
from braid.runtime.clock import Clock, MonotonicClock
from braid.types import text_digest

__all__ = ["OPEN", "Event", "EventRing", "NameTable", "Recorder", "Span"]

OPEN = (1 << 64) - 1  # the duration of a span that has not ended
MAGIC = int.from_bytes(b"BRAIDEV1", "little")
HEADER_BYTES = 4096
RECORD = struct.Struct("=8Q")
RECORD_WORDS = 8
NAME_HEAD = struct.Struct("=QH")
MAX_KNOWN = 16384  # texts that a writer caches, even those that did not fit into the table
NAMES_BYTES = 256 << 10  # some 5,000 texts of 40 bytes; a job uses a few hundred
DEFAULT_CAPACITY = 32768  # records; 2 MiB a rank, some 300 to 1,000 training steps
MAX_NAME_BYTES = 8000  # a table of a mismatch among some 100 ranks

# frames carry strings
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# Braid's own programs. Frames of other files of braid are never the user's line.
_PROGRAMS = tuple(_PACKAGE + name + os.sep for name in ("train", "bench"))
# Frames between the user's line and braid's: backward() and Module.__call__ of torch, ...
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"
# ... and decorators: @deprecated on torch's functions, @no_grad and the like on the program's.
_DECORATORS = tuple(f"{os.sep}{name}.py" for name in ("typing_extensions", "contextlib"))

# header words
_MAGIC, _CAPACITY, _HEAD, _CLOCK_OFFSET, _RANK, _PID, _STACK_THREAD, _STACK_PIPE = range(8)


class Event(NamedTuple):
    """One record of the ring.

    Attributes:
        t_ns: Begin, on the rank's clock.
        dur_ns: Duration, `OPEN` while the span lasts, 0 for an instant.
        kind: Digest of the name, see `EventRing.name`.
        group: Number of the group, 0 when none.
        channel: Channel of the group.
        seq: Sequence number: the step, or the number of the collective.
        nbytes: Bytes moved.
        site: Digest of the call site, or 0.
    """

    t_ns: int
    dur_ns: int
    kind: int
    group: int
    channel: int
    seq: int
    nbytes: int
    site: int

    @property
    def open(self) -> bool:
        """Whether the span has begun and not ended."""
        return self.dur_ns == OPEN


class NameTable:
    """Append-only table of texts by digest in shared memory; one process writes, others read.

    Layout: a 64-bit count of used bytes, then entries of digest (8), length (2) and UTF-8 text. A
    full table keeps its entries; new digests then have no text, and readers print them in
    hexadecimal. The last eighth is reserved for last words: the reason why a rank stopped must be
    readable even after many shapes.
    """

    def __init__(
        self,
        memory: memoryview,
        lock: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self._memory = memory.cast("B")
        self._used = memory.cast("B")[:8].cast("Q")
        self._known: dict[str, int] = {}
        self._texts: dict[int, str] = {}
        self._read_to = 0
        self._adding = lock or contextlib.nullcontext()

    def add(self, text: str, *, last_words: bool = False) -> int:
        """Store `text` if it is not stored yet; return its digest.

        Thread-safe if the table was made with a lock. With `last_words`, use the reserved space.
        """
        digest = self._known.get(text)
        if digest is None:
            with self._adding:
                digest = self._known.get(text) or self._append(text, last_words=last_words)
        return digest

    def _append(self, text: str, *, last_words: bool) -> int:
        digest = text_digest(text)
        raw = text.encode(errors="replace")[:MAX_NAME_BYTES]
        start = 8 + self._used[0]
        end = start + NAME_HEAD.size + len(raw)
        if end <= len(self._memory) * (8 if last_words else 7) // 8:
            NAME_HEAD.pack_into(self._memory, start, digest, len(raw))
            self._memory[start + NAME_HEAD.size : end] = raw
            self._used[0] = end - 8  # published last: a reader never sees half an entry
        elif len(self._known) >= MAX_KNOWN:
            return digest
        self._known[text] = digest
        self._texts[digest] = text
        return digest

    def lookup(self, digest: int) -> str:
        """Return the text of `digest`, or its hexadecimal form if the table had no space for it."""
        text = self._texts.get(digest)
        if text is None:
            self._read_new()
            text = self._texts.get(digest, f"#{digest:016x}" if digest else "")
        return text

    def _read_new(self) -> None:
        end = min(self._used[0], len(self._memory) - 8)
        while self._read_to < end:
            start = 8 + self._read_to
            digest, length = NAME_HEAD.unpack_from(self._memory, start)
            start += NAME_HEAD.size
            raw = bytes(self._memory[start : start + length])
            self._texts[digest] = raw.decode(errors="replace")
            self._read_to = start + length - 8

    def release(self) -> None:
        """Release the views, so that the underlying memory can be unmapped."""
        self._used.release()
        self._memory.release()


class _HeaderWord:
    """Attribute of a ring in its header."""

    def __init__(self, place: int, *, is_fixed: bool = False) -> None:
        self._place = place
        self._is_fixed = is_fixed

    def __get__(self, ring: EventRing, _owner: object) -> int:
        return int(ring.header[self._place])

    def __set__(self, ring: EventRing, value: int) -> None:
        if self._is_fixed:
            msg = "this word of a ring's header is written by its recorder only"
            raise AttributeError(msg)
        ring.header[self._place] = value


class EventRing:
    """Memory of one rank's events: made by the launcher, written by the rank, read by both.

    Args:
        memory: At least `EventRing.nbytes_for(capacity)` bytes, zeroed when `capacity` is given.
        capacity: Number of records of a new ring; None to open an existing ring.
        rank: Rank that writes the ring (new rings only).
        names_lock: Lock of the name table; needed when several threads record.

    Attributes:
        rank: Rank that writes this ring.
        pid: Process id of the writer, 0 until it has opened the ring.
        stack_thread: Number of the writer's thread that accepts requests for stacks; 0 if there is
            none.
        stack_pipe: Descriptor of the pipe that requests stacks from the writer; 0 if there is none.
        written: Number of records begun so far; only the last `capacity` of them are kept.

    Raises:
        ConfigError: The memory does not hold a ring.
    """

    rank = _HeaderWord(_RANK, is_fixed=True)
    pid = _HeaderWord(_PID)
    stack_thread = _HeaderWord(_STACK_THREAD)
    stack_pipe = _HeaderWord(_STACK_PIPE)
    written = _HeaderWord(_HEAD, is_fixed=True)

    def __init__(
        self,
        memory: mmap.mmap | memoryview | bytearray | bytes,
        capacity: int | None = None,
        *,
        rank: int = 0,
        names_lock: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        view = memoryview(memory).cast("B")
        self.header = view[:HEADER_BYTES].cast("Q")
        if capacity is not None:
            self.header[_CAPACITY] = capacity
            self.header[_RANK] = rank
            self.header[_MAGIC] = MAGIC
        if len(view) < HEADER_BYTES or self.header[_MAGIC] != MAGIC:
            msg = (
                f"{len(view)} bytes of memory are not a braid event ring, its mark is missing: "
                "open a ring that a launcher or Recorder wrote"
            )
            raise ConfigError(msg)
        self.capacity = int(self.header[_CAPACITY])
        end = HEADER_BYTES + self.capacity * RECORD.size
        self.records = view[HEADER_BYTES:end]
        self.names = NameTable(view[end : end + NAMES_BYTES], names_lock)
        self._view = view

    @staticmethod
    def nbytes_for(capacity: int = DEFAULT_CAPACITY) -> int:
        """Return the bytes of memory that a ring of `capacity` records needs."""
        return HEADER_BYTES + capacity * RECORD.size + NAMES_BYTES

    @property
    def clock_offset_ns(self) -> int:
        """Nanoseconds to add to `t_ns` for the launcher's clock; 0 on the launcher's host."""
        raw = int(self.header[_CLOCK_OFFSET])
        return raw - (1 << 64) if raw >> 63 else raw

    @clock_offset_ns.setter
    def clock_offset_ns(self, value: int) -> None:
        """Nanoseconds to add to `t_ns` for the launcher's clock; 0 on the launcher's host."""
        self.header[_CLOCK_OFFSET] = value & ((1 << 64) - 1)

    def name(self, digest: int) -> str:
        """Return the text whose digest a record has as its kind or call site."""
        return self.names.lookup(digest)

    def tail(self, count: int | None = None) -> list[Event]:
        """Return the last `count` records, oldest first; None for all that are kept."""
        written = self.written
        kept = min(written, self.capacity)
        count = kept if count is None else min(count, kept)
        size = RECORD.size
        events = []
        for index in range(written - count, written):
            event = Event(*RECORD.unpack_from(self.records, index % self.capacity * size))
            if event.t_ns:
                events.append(event)
        return events

    def open_spans(self) -> list[Event]:
        """Return the spans that have begun but not ended, outermost first."""
        return sorted((e for e in self.tail() if e.open), key=lambda event: event.t_ns)

    def release(self) -> None:
        """Release all views, so that the memory can be unmapped."""
        self.names.release()
        self.records.release()
        self.header.release()
        self._view.release()


class _Inner(dict[str, bool]):
    """Cache of which files' frames are skipped in the search for the program's line."""

    def __missing__(self, path: str) -> bool:
        is_braids = path.startswith(_PACKAGE) and not path.startswith(_PROGRAMS)
        inner = is_braids or _TORCH in path or path.endswith(_DECORATORS)
        self[path] = inner
        return inner


class Span(msgspec.Struct, frozen=True):
    """A span in progress; ends at the end of its `with` block, or by `end()`.

    Attributes:
        recorder: Recorder that wrote its beginning.
        number: Number of its record.
        t_ns: Time of its beginning.
    """

    recorder: Recorder
    number: int
    t_ns: int

    def end(self) -> int:
        """Set the duration of the record and return it, in nanoseconds."""
        recorder, t_ns = self.recorder, self.t_ns
        dur_ns = recorder.now_ns() - t_ns
        word = self.number % recorder.capacity * RECORD_WORDS
        words = recorder.words
        if words[word] == t_ns:  # else a later record has overwritten the beginning
            words[word + 1] = dur_ns
        return dur_ns

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()


class Recorder:
    """Writer of the events of one rank; one per process, in its `RankContext`.

    Any thread may record. `listener`, if set, is called with (kind, seq) at the begin of every
    span; scripted faults use it to act at a given step.

    Args:
        ring: Memory to write to; None for private memory.
        clock: Time source; None for the host's clock.

    Cost: about 1 microsecond for a span, begin and end together.
    """

    def __init__(self, ring: EventRing | None = None, clock: Clock | None = None) -> None:
        if ring is None:
            ring = EventRing(bytearray(EventRing.nbytes_for(4096)), 4096)
        self.ring = ring
        self.listener: Callable[[str, int], None] | None = None
        self.now_ns = (clock or MonotonicClock()).now_ns
        self._kinds: dict[str, int] = {}
        self._indices = itertools.count(ring.written)
        self.words = ring.records.cast("Q")
        self._header = ring.header
        self.capacity = ring.capacity
        self._inner = _Inner()
        # keeps each code object as long as its id is used
        self._sites: dict[tuple[int, int], tuple[int, CodeType]] = {}

    def span(
        self,
        kind: str,
        *,
        group: int = 0,
        channel: int = 0,
        seq: int = 0,
        nbytes: int = 0,
        site: int = 0,
    ) -> Span:
        """Begin a span named `kind`; it ends with its `with` block or with `Span.end()`.

        The other arguments are fields of the record; see `Event`.
        """
        if self.listener is not None:
            self.listener(kind, seq)
        t_ns = self.now_ns()
        number = self.complete(kind, t_ns, OPEN, group, channel, seq, nbytes, site)
        return Span(self, number, t_ns)

    def instant(self, kind: str, *, seq: int = 0, nbytes: int = 0, site: int = 0) -> None:
        """Record an event named `kind`, without duration.

        The other arguments are fields of the record; see `Event`.
        """
        if self.listener is not None:
            self.listener(kind, seq)
        self.complete(kind, self.now_ns(), 0, seq=seq, nbytes=nbytes, site=site)

    def complete(  # noqa: PLR0917 - the words of one record
        self,
        kind: str,
        t_ns: int,
        dur_ns: int,
        group: int = 0,
        channel: int = 0,
        seq: int = 0,
        nbytes: int = 0,
        site: int = 0,
    ) -> int:
        """Write the record of a span named `kind`, and return the number of the record.

        The other arguments are fields of the record; see `Event`.
        """
        index = next(self._indices)
        digest = self._kinds.get(kind)
        if digest is None:
            digest = self.intern(kind)
        RECORD.pack_into(
            self.ring.records,
            index % self.capacity * RECORD.size,
            t_ns,
            dur_ns,
            digest,
            group,
            channel,
            seq,
            nbytes,
            site,
        )
        self._header[_HEAD] = index + 1
        return index

    def tail(self, n: int) -> list[Event]:
        """Return the last `n` events, oldest first."""
        return self.ring.tail(n)

    def intern(self, text: str) -> int:
        """Store `text` in the ring's name table; return its digest."""
        digest = self._kinds.get(text)
        if digest is None:
            digest = self._kinds[text] = self.ring.names.add(text)
        return digest

    def site(self) -> int:
        """Return the digest of the current line of user code, such as `file.py:41 in function`."""
        frame = sys._getframe(1)  # noqa: SLF001 - the only way to see the caller
        inner = self._inner
        while inner[frame.f_code.co_filename] and (before := frame.f_back) is not None:
            frame = before
        code = frame.f_code
        key = (id(code), frame.f_lasti)  # the hash of a code object reads all of it
        known = self._sites.get(key)
        if known is None:
            here = os.getcwd() + os.sep  # noqa: PTH109 - frames have strings
            path = code.co_filename.removeprefix(here)
            digest = self.ring.names.add(f"{path}:{frame.f_lineno} in {code.co_name}")
            known = self._sites[key] = (digest, code)
        return known[0]
