"""Waiting: spin a little, yield for a while, then sleep until someone rings.

Problem: inside a host a peer is usually less than a microsecond away, and a system call costs more
than the message. But a peer may also be a second away, or dead, and a rank that spins takes the
core that its peer needs: two ranks that spin on one core cost milliseconds.

Idea: a collective is a generator that yields `Wait` and never blocks itself. How to wait is decided
here:

    look      the value is there already: the common case, which costs nothing
    spin      some 100 looks (none when there are more ranks than cores)
    yield     `sched_yield`, which gives the core and the interpreter's lock to others, for about
              a millisecond
    sleep     `poll` on this waiter's doorbell (a pipe), the peers' pidfds and the launcher's
              socket: a value that arrives rings the bell and a death makes a pidfd readable, so
              both end the sleep at once

Sleeping and publishing race. The publisher stores its value and then looks whether anyone sleeps;
the sleeper announces itself and then looks at the value. Each puts a full fence between its two
steps, so at least one sees the other. Taking and releasing a free lock is such a fence on x86 (an
instruction with the LOCK prefix). Should a ring be lost all the same, the sleep ends after 50 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

from braid.runtime.clock import Clock
from braid.runtime.transport.health import Health
from braid.runtime.transport.memory import SLEEPERS, Root

__all__ = [
    "DeviceWait",
    "Doorbells",
    "Sleep",
    "Steps",
    "Wait",
    "WaitAny",
    "Waiter",
    "silent_pipe",
    "yield_core",
]

NUM_SLOTS = 4  # threads of one rank that may sleep at the same time
NUM_SPINS = 100
YIELD_NS = 1_000_000
SLEEP_MS = 50
EVENT_POLL_S = 5e-5  # of a thread that waits for a GPU; short beside a copy
SLOTLESS_SLEEP_MS = 2  # of a thread that found no doorbell free: nobody can ring it
DEVICE_SLEEP_MS = 1  # while a GPU is awaited, which rings no bell

yield_core = ctypes.CDLL(None).sched_yield


class Wait(NamedTuple):
    """Condition of a wait: the counter of `peer` on `channel` reaches `value`.

    Attributes:
        peer: Group rank.
        channel: Channel of the group.
        value: Counter value; counters only grow.
    """

    peer: int
    channel: int
    value: int


class WaitAny(NamedTuple):
    """Condition of a wait: at least one of several counters reaches its value.

    Attributes:
        waits: The alternatives.
    """

    waits: tuple[Wait, ...]


class DeviceWait(NamedTuple):
    """Condition of a wait: a GPU has passed an event.

    Attributes:
        event: `torch.cuda.Event`, recorded behind the awaited work.
        device: The GPU.
    """

    event: Any
    device: Any

    def is_completed(self) -> bool:
        """Return whether the GPU has passed the event, or will never pass it after an error.

        The error is raised by `check`, in the operation that waits: other threads look here, too.
        """
        try:
            return bool(self.event.query())
        except RuntimeError:
            return True

    def check(self) -> None:
        """Raise the error of the GPU, if work queued before the event has failed."""
        self.event.query()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the event, as for a work of torch.

        Raises:
            TimeoutError: `timeout` has passed.
        """
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self.event.query():
            if end is not None and time.monotonic() > end:
                msg = f"timed out: work queued on {self.device} has not ended"
                raise TimeoutError(msg)
            time.sleep(EVENT_POLL_S)


Steps = Generator[Wait | WaitAny, None, None]


class Doorbells:
    """The pipes that wake this rank's sleeping threads, and the word that says which of them sleep.

    Args:
        root: Root of this rank, whose `SLEEPERS` word peers look at.

    Attributes:
        device_waits: Keys of the operations of this rank that wait for a GPU.
    """

    def __init__(self, root: Root) -> None:
        self.device_waits: set[int] = set()
        self._words = root.words
        self._pipes = [silent_pipe() for _ in range(NUM_SLOTS)]
        self._free = list(range(NUM_SLOTS))
        self._lock = threading.Lock()

    @property
    def write_fds(self) -> tuple[int, ...]:
        """Descriptors that peers open to ring."""
        return tuple(write for _, write in self._pipes)

    def fds(self) -> list[int]:
        """Return the descriptors of both ends."""
        return [fd for pipe in self._pipes for fd in pipe]

    def acquire(self) -> int:
        """Take a slot for this thread; -1 when all are taken, which makes it wake more slowly."""
        with self._lock:
            return self._free.pop() if self._free else -1

    def release(self, slot: int) -> None:
        """Give a slot back, disarmed and with its pipe empty."""
        if slot >= 0:
            self.disarm(slot)
            with self._lock:
                self._free.append(slot)

    def arm(self, slot: int) -> None:
        """Announce that this slot is about to sleep. Taking the lock is the fence."""
        with self._lock:
            self._words[SLEEPERS] |= 1 << slot

    def disarm(self, slot: int) -> None:
        """Take the announcement back and read the rings so far."""
        with self._lock:
            self._words[SLEEPERS] &= ~(1 << slot)
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipes[slot][0], 4096)

    def read_fd(self, slot: int) -> int:
        """Return the descriptor to poll."""
        return self._pipes[slot][0]

    def ring_own(self) -> None:
        """Wake the sleeping threads of this rank, for a new request or a loss."""
        if not self._pipes:  # closed while an operation was ending: no thread of this rank sleeps
            return
        sleepers = self._words[SLEEPERS]
        for slot in range(NUM_SLOTS):
            if sleepers >> slot & 1:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._pipes[slot][1], b"!")

    def close(self) -> None:
        """Close the pipes."""
        for read, write in self._pipes:
            os.close(read)
            os.close(write)
        self._pipes.clear()


def silent_pipe() -> tuple[int, int]:
    """Make a pipe whose ends never block and are not inherited."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write


class Waiter:
    """Waits for conditions on behalf of any thread of this rank.

    Args:
        bells: Doorbells of this rank.
        health: Registry of lost peers; its descriptors are part of every sleep.
        clock: Measures the yield phase.
        crowded: There are more ranks than cores, so do not spin.
    """

    def __init__(self, bells: Doorbells, health: Health, clock: Clock, *, crowded: bool) -> None:
        self._bells = bells
        self._health = health
        self._now_ns = clock.now_ns
        self._spins = 0 if crowded else NUM_SPINS

    def until(self, ready: Callable[[], bool], check: Callable[[], None]) -> int:
        """Wait until `ready()` holds; return the nanoseconds it took, or 0 if it only spun.

        Args:
            ready: The condition; called often, must be quick and must not block.
            check: Called after each sleep; raises when waiting on is pointless (a lost peer, a
                deadline).

        Raises:
            Whatever `check` raises.
        """
        for _ in range(self._spins):
            if ready():
                return 0
        start = now = self._now_ns()
        while now - start < YIELD_NS:
            for _ in range(16):
                yield_core()
                if ready():
                    return self._now_ns() - start
            now = self._now_ns()
        with Sleep(self._bells) as sleep:
            while not sleep.poll(ready, self._health.fds()):
                self._health.collect()
                if not ready():
                    check()
        return self._now_ns() - start


class Sleep:
    """A doorbell slot that one thread holds while it sleeps."""

    def __init__(self, bells: Doorbells) -> None:
        self._bells = bells
        self._slot = -1

    def __enter__(self) -> Sleep:
        self._slot = self._bells.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bells.release(self._slot)

    def poll(
        self, ready: Callable[[], bool], fds: list[int], interests: Sequence[tuple[int, int]] = ()
    ) -> bool:
        """Sleep once unless `ready()` holds; return whether it held before the sleep.

        Args:
            ready: As for `Waiter.until`.
            fds: Descriptors that end the sleep when they become readable.
            interests: More descriptors, each with the events that end the sleep.
        """
        if self._slot >= 0:
            self._bells.arm(self._slot)
        if ready():
            return True
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        for fd, events in interests:
            poller.register(fd, events)
        if self._slot < 0:
            poller.poll(SLOTLESS_SLEEP_MS)
            return False
        poller.register(self._bells.read_fd(self._slot), select.POLLIN)
        poller.poll(DEVICE_SLEEP_MS if self._bells.device_waits else SLEEP_MS)
        self._bells.disarm(self._slot)
        return False
