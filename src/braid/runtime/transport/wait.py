"""Waiting: spin for a short time, yield for a while, then sleep until a peer rings.

Problem: inside a host a peer usually answers in less than a microsecond, and a system call costs
more than the message. But a peer may also need a second, or be dead, and a rank that spins uses the
core that its peer may need: two ranks that spin on one core lose milliseconds.

Idea: a collective is a generator that yields `Wait` and never blocks itself. This module decides
how to wait:

    check     if the value is there already, waiting costs nothing (the common case)
    spin      check about 100 times (not if there are more ranks than cores)
    yield     `sched_yield`, which leaves the core and the interpreter's lock to others, for about
              a millisecond
    sleep     `poll` on this waiter's doorbell (a pipe), the peers' pidfds and the launcher's
              socket: a new value rings the bell and a death makes a pidfd readable, so both end
              the sleep at once

Sleeping and publishing race. The publisher stores its value and then checks whether a peer sleeps;
the sleeper announces its sleep and then checks the value. Each puts a full fence between its two
steps, so at least one sees the other's store. Taking and releasing a free lock is such a fence on
x86 (an instruction with the LOCK prefix). If a ring is lost all the same, the sleep ends after
50 ms.
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
EVENT_POLL_S = 5e-5  # pause of a thread that waits for a GPU; short compared with a copy
SLOTLESS_SLEEP_MS = 2  # sleep of a thread without a doorbell, which no peer can wake
DEVICE_SLEEP_MS = 1  # sleep while an operation waits for a GPU, which cannot ring a doorbell

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
    """Condition of a wait: a GPU has reached an event.

    Attributes:
        event: `torch.cuda.Event`, recorded after the awaited work.
        device: The GPU.
    """

    event: Any
    device: Any

    def is_completed(self) -> bool:
        """Return whether the GPU has reached the event, or cannot reach it because of an error.

        Any thread may call this, so the error is raised by `check`, in the operation that waits.
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
                msg = f"timed out: operations queued on {self.device} have not ended"
                raise TimeoutError(msg)
            time.sleep(EVENT_POLL_S)


Steps = Generator[Wait | WaitAny, None, None]


class Doorbells:
    """Pipes that wake this rank's sleeping threads, and the word with a bit for each of them.

    Args:
        root: Root of this rank, its first shared memory; peers read its `SLEEPERS` word.

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
        """Take a doorbell (a pipe that wakes this thread) and return its number.

        Returns -1 if all doorbells are in use; the thread then wakes only at the end of its sleep.
        """
        with self._lock:
            return self._free.pop() if self._free else -1

    def release(self, slot: int) -> None:
        """Give back a doorbell from `acquire`, disarmed and with its pipe empty."""
        if slot >= 0:
            self.disarm(slot)
            with self._lock:
                self._free.append(slot)

    def arm(self, slot: int) -> None:
        """Announce to peers that the thread of this doorbell is about to sleep.

        Taking the lock is the memory fence.
        """
        with self._lock:
            self._words[SLEEPERS] |= 1 << slot

    def disarm(self, slot: int) -> None:
        """Withdraw the announcement of `arm`, and empty the doorbell's pipe."""
        with self._lock:
            self._words[SLEEPERS] &= ~(1 << slot)
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipes[slot][0], 4096)

    def read_fd(self, slot: int) -> int:
        """Return the descriptor that becomes readable when a peer rings this doorbell."""
        return self._pipes[slot][0]

    def ring_own(self) -> None:
        """Wake the sleeping threads of this rank, for a new request or a lost rank."""
        if not self._pipes:  # closed while an operation ended: no thread of this rank sleeps
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
    """Make a pipe that never blocks and is not inherited."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write


class Waiter:
    """Waits for conditions on behalf of any thread of this rank.

    Args:
        bells: Doorbells (pipes) that wake this rank's threads.
        health: Registry of lost peers; its descriptors are part of every sleep.
        clock: Clock for the yield phase and durations.
        crowded: Whether there are more ranks than cores, so that spinning is not useful.
    """

    def __init__(self, bells: Doorbells, health: Health, clock: Clock, *, crowded: bool) -> None:
        self._bells = bells
        self._health = health
        self._now_ns = clock.now_ns
        self._spins = 0 if crowded else NUM_SPINS

    def until(self, ready: Callable[[], bool], check: Callable[[], None]) -> int:
        """Wait until `ready()` is true; return the nanoseconds it took, or 0 if it only spun.

        Args:
            ready: The condition; called often, must be quick and must not block.
            check: Called after each sleep; raises if further waiting has no use (a lost peer, a
                deadline).

        Raises:
            Whatever `check` raises.
        """
        waited_ns = self.spin(ready)
        if waited_ns >= 0:
            return waited_ns
        start = self._now_ns() - YIELD_NS
        with Sleep(self._bells) as sleep:
            while not sleep.poll(ready, self._health.fds()):
                self._health.collect()
                if not ready():
                    check()
        return self._now_ns() - start

    def spin(self, ready: Callable[[], bool]) -> int:
        """Wait at most about a millisecond until `ready()` is true, without sleeping.

        Returns:
            Nanoseconds for which this left the core to others, 0 if it only spun, and -1 if
            `ready()` is not true.
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
        return -1


class Sleep:
    """Context in which a thread may sleep; it holds a doorbell (a pipe that wakes it)."""

    def __init__(self, bells: Doorbells) -> None:
        self._bells = bells
        self._slot = -1

    def __enter__(self) -> Sleep:
        self._slot = self._bells.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bells.release(self._slot)

    def poll(
        self, ready: Callable[[], bool], fds: list[int], interests: Sequence[tuple[int, int]] = ()
    ) -> bool:
        """Sleep once unless `ready()` is true; return whether it was true before the sleep.

        Args:
            ready: Condition, as for `Waiter.until`.
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
