"""A store in a file, for jobs whose processes share a directory and nothing else.

Problem: a process may be killed at any byte of a write. No other process may then see half an
operation, or wait for the lock of the dead process. Torch's FileStore has one record per `set`, no
checksum, and does not handle an incomplete last record.

Idea: the file is a log of the requests that change the store, each with length and checksum. The
content of the store is a `StoreTable` after replaying the log, so all processes that have read
equally far see the same content. A change is made under an exclusive `flock`, which the kernel
releases when the process is killed; the next writer cuts off its incomplete last record.

    "BRAIDKV1" | length u32 | crc32 u32 | request (msgpack) | length u32 | crc32 u32 | request | ...

Source: the write-ahead log of databases (C. Mohan et al., "ARIES", TODS 1992), without checkpoints:
a job's rendezvous writes kilobytes.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from braid.errors import CommTimeout, ConfigError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.closing import Closing
from braid.runtime.store.interface import Store
from braid.runtime.store.store_state import (
    Add,
    Append,
    CompareSet,
    Delete,
    Missing,
    MultiSet,
    Reply,
    Request,
    Set,
    StoreTable,
)
from braid.runtime.wire import DEFAULT_TIMEOUT_S

__all__ = ["FileStore"]

_MAGIC = b"BRAIDKV1"
_HEAD = struct.Struct("<II")
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_MAX_RECORD_BYTES = 1 << 30
_PAUSE_FIRST_S = 0.0005
_PAUSE_MOST_S = 0.02  # longest delay before a waiting process notices a key


class FileStore(Closing, Store):
    """A store in a file; every process opens the same path.

    The file stays when all processes have closed it, and grows with every change: use a new path
    for each run. The file system must support `flock` (local ones and NFS from version 4 do).

    Args:
        path: Path of the file; created with mode 0600 if missing. Its directory must exist.
        default_timeout_s: Time-out of operations that are called without one.
        clock: Clock for deadlines and pauses; the host's when None.

    Raises:
        ConfigError: The file cannot be opened, or is not a store.

    On failure: a process that is killed leaves neither a lock nor half an operation. A process that
    is *stopped* inside an operation keeps the lock; other processes then get a CommTimeout that
    names this cause.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        default_timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(default_timeout_s)
        self._path = Path(path)
        self._clock = clock or MonotonicClock()
        self._table = StoreTable()
        self._read_to = 0  # end of the last complete record in the table
        self._thread_lock = threading.Lock()  # flock does not exclude threads of one descriptor
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            msg = f"cannot open the store {self._path}: {exc.strerror}; name a writable file"
            raise ConfigError(msg) from exc
        try:
            with self._locked(fcntl.LOCK_EX, self._deadline_ns(default_timeout_s)):
                self._begin()
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Close the file, which is not removed. Idempotent."""
        with self._thread_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __repr__(self) -> str:
        return f"<FileStore {self._path}>"

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Execute a request, and return the store's reply; see `Store.ask`."""
        deadline_ns = self._deadline_ns(timeout_s)
        # A short time-out for a key must not shorten the wait for the lock.
        lock_deadline_ns = self._deadline_ns(max(timeout_s, self.default_timeout_s))
        changes = isinstance(request, (Set, Add, CompareSet, Delete, MultiSet, Append))
        pause_s = _PAUSE_FIRST_S
        while True:
            with self._locked(fcntl.LOCK_EX if changes else fcntl.LOCK_SH, lock_deadline_ns):
                self._replay()
                if changes:
                    return self._change(request)
                reply = self._table.apply(request)
            if not isinstance(reply, Missing) or self._clock.now_ns() >= deadline_ns:
                return reply
            self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MOST_S)

    def _deadline_ns(self, timeout_s: float) -> int:
        return self._clock.after_ns(timeout_s)

    @contextmanager
    def _locked(self, kind: int, deadline_ns: int) -> Iterator[None]:
        pause_s = _PAUSE_FIRST_S
        with self._thread_lock:
            if self._fd < 0:
                msg = f"the store {self._path} is closed in this process: open a new FileStore"
                raise ConfigError(msg)
            while True:
                try:
                    fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._clock.now_ns() >= deadline_ns:
                        msg = (
                            f"cannot lock the store {self._path} in time: another process holds "
                            f"its lock, find it with `fuser {self._path}`"
                        )
                        raise CommTimeout(msg) from None
                    self._clock.sleep(pause_s)
                    pause_s = min(2 * pause_s, _PAUSE_MOST_S)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _begin(self) -> None:
        """Mark a new file as a store, or check that an old file is one."""
        start = os.pread(self._fd, len(_MAGIC), 0)
        if not _MAGIC.startswith(start):
            msg = (
                f"{self._path} is not a file of a braid store, it begins with {start!r}: use a "
                "new file"
            )
            raise ConfigError(msg)
        if start != _MAGIC:  # new, or its creator was killed before this write
            os.pwrite(self._fd, _MAGIC, 0)
        self._read_to = len(_MAGIC)

    def _replay(self) -> None:
        """Apply all complete records that this process has not read."""
        size = os.fstat(self._fd).st_size
        while size - self._read_to >= _HEAD.size:
            length, checksum = _HEAD.unpack(os.pread(self._fd, _HEAD.size, self._read_to))
            if not 0 < length <= size - self._read_to - _HEAD.size:
                return  # cut off, or zeros that a file system leaves after a power failure
            body = os.pread(self._fd, length, self._read_to + _HEAD.size)
            if zlib.crc32(body) != checksum:
                return
            try:
                request = _REQUESTS.decode(body)
            except msgspec.DecodeError as exc:
                msg = (
                    f"the store {self._path} was written by another version of braid, at byte "
                    f"{self._read_to} ({exc}): use a new file"
                )
                raise ConfigError(msg) from exc
            self._table.apply(request)
            self._read_to += _HEAD.size + length

    def _change(self, request: Request) -> Reply:
        """Append `request` to the log, then execute it."""
        body = msgspec.msgpack.encode(request)
        if len(body) > _MAX_RECORD_BYTES:
            msg = (
                f"one operation may write at most {_MAX_RECORD_BYTES} bytes, got {len(body)}: "
                "write in parts"
            )
            raise ConfigError(msg)
        record = _HEAD.pack(len(body), zlib.crc32(body)) + body
        # A writer that was killed may have left bytes after the last complete record.
        if os.fstat(self._fd).st_size > self._read_to:
            os.ftruncate(self._fd, self._read_to)
        try:
            written = 0
            while written < len(record):
                written += os.pwrite(self._fd, record[written:], self._read_to + written)
        except OSError as exc:
            os.ftruncate(self._fd, self._read_to)
            msg = (
                f"cannot write {len(record)} bytes to the store {self._path}: {exc.strerror}; "
                "make room there, or name a file elsewhere"
            )
            raise ConfigError(msg) from exc
        self._read_to += len(record)
        return self._table.apply(request)
